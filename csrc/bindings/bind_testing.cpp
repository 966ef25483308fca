// Pieces of the engine by themselves, for tests/native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bind.h"
#include "engine/cache_table.h"
#include "engine/copy_pace.h"
#include "engine/copy_threads.h"
#include "engine/messages.h"
#include "engine/prober.h"
#include "model/block_runs.h"
#include "shm/memory_limit.h"
#include "shm/shared_regions.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

using Triple = std::tuple<uint64_t, uint64_t, uint64_t>;

std::vector<Triple> merge(const std::vector<uint64_t>& src, const std::vector<uint64_t>& dst) {
  std::vector<Triple> runs;
  for (const BlockRun& run : merge_blocks(src, dst)) runs.push_back({run.src, run.dst, run.count});
  return runs;
}

std::vector<Triple> cut_row(uint64_t offset, uint64_t row_bytes, uint64_t block_bytes,
                            const std::vector<uint64_t>& dst) {
  std::vector<Triple> runs;
  for (const ByteRun& run : row_to_blocks(offset, row_bytes, block_bytes, dst)) {
    runs.push_back({run.src_offset, run.dst_offset, run.length});
  }
  return runs;
}

template <typename Message>
nb::bytes round_trip(const Bytes& payload) {
  Bytes again = Message::decode(payload).encode();
  return nb::bytes(reinterpret_cast<const char*>(again.data()), again.size());
}

// Decodes a payload as the message of this type and encodes it again.
nb::bytes recode(uint16_t type, nb::bytes payload) {
  auto* data = reinterpret_cast<const uint8_t*>(payload.c_str());
  Bytes bytes(data, data + payload.size());
  switch (static_cast<MessageType>(type)) {
    case MessageType::kHello:
      return round_trip<Hello>(bytes);
    case MessageType::kWelcome:
      return round_trip<Welcome>(bytes);
    case MessageType::kIntroduce:
      return round_trip<Introduce>(bytes);
    case MessageType::kReject:
    case MessageType::kVerdict:
    case MessageType::kFailure:
      return round_trip<Outcome>(bytes);
    case MessageType::kResolve:
      return round_trip<Resolve>(bytes);
    case MessageType::kResolved:
      return round_trip<Resolved>(bytes);
    case MessageType::kFinish:
      return round_trip<Finish>(bytes);
    case MessageType::kPush:
      return round_trip<Push>(bytes);
    case MessageType::kStage:
      return round_trip<Stage>(bytes);
    case MessageType::kFetch:
      return round_trip<Fetch>(bytes);
    default:
      throw WireError("a message without a payload");
  }
}

nb::bytes hmac(const std::string& key, nb::bytes message) {
  auto* data = reinterpret_cast<const uint8_t*>(message.c_str());
  Digest digest = hmac_sha256(key, {data, data + message.size()});
  return nb::bytes(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::tuple<uint16_t, uint32_t, uint64_t> header(nb::bytes data, uint32_t max_payload) {
  if (data.size() != kFrameHeaderBytes) throw WireError("a header has 24 bytes");
  FrameHeader decoded = decode_header(reinterpret_cast<const uint8_t*>(data.c_str()), max_payload);
  return {static_cast<uint16_t>(decoded.type), decoded.payload_bytes, decoded.call_id};
}

int64_t add(CacheTable& table, std::vector<int64_t> shape, bool is_blocks,
            std::vector<uint64_t> addrs, const std::vector<Triple>& keys,
            std::optional<uint64_t> model_id) {
  CacheSpec spec;
  spec.shape = std::move(shape);
  spec.element_bytes = 1;
  spec.is_blocks = is_blocks;
  spec.tensor_addrs = std::move(addrs);
  std::vector<RowKey> row_keys;
  for (auto [req_id, prefix_id, model] : keys) row_keys.push_back({req_id, prefix_id, model});
  return table.add(spec, row_keys, model_id);
}

std::pair<int64_t, uint64_t> find(const CacheTable& table, uint8_t kind, uint64_t id,
                                  uint64_t model_id, uint64_t row) {
  FoundRow found = table.find({static_cast<KeyKind>(kind), id, model_id, row});
  return {found.cache->id, found.row};
}

void copy_blocks(uint64_t src_addr, uint64_t dst_addr, size_t block_bytes,
                 const std::vector<uint64_t>& src, const std::vector<uint64_t>& dst) {
  auto* source = reinterpret_cast<const char*>(src_addr);
  auto* destination = reinterpret_cast<char*>(dst_addr);
  for (size_t i = 0; i < src.size(); ++i) {
    std::memcpy(destination + dst[i] * block_bytes, source + src[i] * block_bytes, block_bytes);
  }
}

}  // namespace

void bind_testing(nb::module_& module) {
  nb::module_ testing = module.def_submodule("testing", "Pieces of the engine, for its own tests.");
  testing.attr("WIRE_MAGIC") = kWireMagic;
  testing.attr("WIRE_VERSION") = kWireVersion;
  testing.attr("MAX_PAYLOAD") = kMaxPayload;
  testing.def("merge_blocks", &merge, "src"_a, "dst"_a);
  testing.def("row_to_blocks", &cut_row, "row_offset"_a, "row_bytes"_a, "block_bytes"_a, "dst"_a);
  testing.def("recode", &recode, "message_type"_a, "payload"_a);
  testing.def("hmac_sha256", &hmac, "key"_a, "message"_a);
  testing.def("decode_header", &header, "data"_a, "max_payload"_a);
  testing.def("copy_blocks", &copy_blocks, "src_addr"_a, "dst_addr"_a, "block_bytes"_a, "src"_a,
              "dst"_a, "Bare memcpy of block pairs inside one process: the bound of the benches.");
  testing.def("set_copy_rate", &set_copy_rate, "bytes_per_second"_a,
              "Slow this process's copies down to a link's rate; 0 takes the bound away.");
  testing.def("set_copy_width", &set_copy_width, "threads"_a,
              "At most this many threads work on one copy; 0 is the usual number.");
  testing.def("set_share_minimum", &set_share_minimum, "bytes"_a,
              "The smallest piece of memory that is shared with peers; 0 is the usual one.");
  testing.def("limit_shared_memory", &limit_shared_memory, "bytes"_a,
              "The system has no more for one file of shared memory; 0 ends that.");
  testing.def("memory_headroom", &memory_headroom, "proc"_a,
              "Bytes that the control groups of a process leave it; `proc` is its /proc/PID.");
  testing.def("probe_sentence", &probe_sentence, "pid"_a, "error"_a);
  nb::class_<CacheTable>(testing, "CacheTable")
      .def(nb::init<>())
      .def("add", &add, "shape"_a, "is_blocks"_a, "addrs"_a, "keys"_a, "model_id"_a.none())
      .def("remove", &CacheTable::remove, "cache_id"_a)
      .def("find", &find, "kind"_a, "id"_a, "model_id"_a, "row"_a);
}

}  // namespace llmdd::bindings
