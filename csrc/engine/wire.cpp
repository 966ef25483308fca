#include "engine/wire.h"

#include <cstring>

namespace llmdd {

void WireWriter::text(const std::string& value) {
  std::string cut = value.substr(0, kMaxText);
  u16(static_cast<uint16_t>(cut.size()));
  raw(reinterpret_cast<const uint8_t*>(cut.data()), cut.size());
}

void WireWriter::u64_list(const std::vector<uint64_t>& values) {
  u32(static_cast<uint32_t>(values.size()));
  for (uint64_t value : values) u64(value);
}

const uint8_t* WireReader::advance(size_t size) {
  if (size > left_) throw WireError("a message ends too early");
  const uint8_t* start = data_;
  data_ += size;
  left_ -= size;
  return start;
}

bool WireReader::flag() {
  uint8_t value = u8();
  if (value > 1) throw WireError("a flag is " + std::to_string(value) + ", must be 0 or 1");
  return value == 1;
}

std::string WireReader::text() {
  size_t size = u16();
  if (size > kMaxText) throw WireError("a text of " + std::to_string(size) + " bytes is too long");
  const uint8_t* bytes = advance(size);
  return std::string(reinterpret_cast<const char*>(bytes), size);
}

void WireReader::raw(uint8_t* out, size_t size) {
  const uint8_t* bytes = advance(size);
  if (size > 0) std::memcpy(out, bytes, size);  // an empty vector's data may be null
}

size_t WireReader::count(size_t element_bytes) {
  size_t elements = u32();
  if (elements > left_ / element_bytes) {
    throw WireError("a list of " + std::to_string(elements) + " elements does not fit its message");
  }
  return elements;
}

std::vector<uint64_t> WireReader::u64_list() {
  std::vector<uint64_t> values(count(sizeof(uint64_t)));
  for (uint64_t& value : values) value = u64();
  return values;
}

void WireReader::expect_end() const {
  if (left_ != 0) throw WireError(std::to_string(left_) + " bytes too many in a message");
}

Bytes encode_frame(MessageType type, uint64_t call_id, const Bytes& payload) {
  WireWriter writer;
  writer.u32(kWireMagic);
  writer.u16(kWireVersion);
  writer.u16(static_cast<uint16_t>(type));
  writer.u32(static_cast<uint32_t>(payload.size()));
  writer.u32(0);
  writer.u64(call_id);
  writer.raw(payload.data(), payload.size());
  return writer.take();
}

FrameHeader decode_header(const uint8_t* data, uint32_t max_payload) {
  WireReader reader(data, kFrameHeaderBytes);
  if (reader.u32() != kWireMagic)
    throw WireError("these bytes are not from an LLM-DataDist engine");
  uint16_t version = reader.u16();
  if (version != kWireVersion) {
    throw WireError("protocol version differs: local " + std::to_string(kWireVersion) +
                    ", peer has " + std::to_string(version) +
                    "; install the same package version on both sides");
  }
  FrameHeader header;
  header.type = static_cast<MessageType>(reader.u16());
  header.payload_bytes = reader.u32();
  reader.u32();
  header.call_id = reader.u64();
  if (header.payload_bytes > max_payload) {
    throw WireError("a message of " + std::to_string(header.payload_bytes) +
                    " bytes is over the limit of " + std::to_string(max_payload));
  }
  return header;
}

}  // namespace llmdd
