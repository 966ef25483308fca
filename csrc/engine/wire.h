// Bytes two engines agree on: little-endian fields, written and read by hand.
//
// Layout of a frame: magic u32, version u16, type u16, payload length u32, 0 u32, call id u64,
// payload. Version history:
//   1  first version
//   2  Finish says what was pulled, so that the source can drop the key of an allocated row;
//      Push may name raw addresses or a reservation
//   3  Share and Withdraw, and in Introduce whether the sender maps shared memory; Hello and
//   Welcome
//      say how bytes are to move; Stage and Fetch for links over NIXL
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace llmdd {

constexpr uint32_t kWireMagic = 0x4444'4D4C;  // "LMDD"
constexpr uint16_t kWireVersion = 3;
constexpr size_t kFrameHeaderBytes = 24;
constexpr uint32_t kMaxHandshakePayload = 4096;
// An agent's metadata grows with the number of network cards, 300 bytes for one.
constexpr uint32_t kMaxStagePayload = 64U << 10;
constexpr uint32_t kMaxPayload = 32U << 20;
constexpr size_t kMaxText = 1024;

using Bytes = std::vector<uint8_t>;

// The peer sent something this version does not allow. The link or handshake ends; the process goes
// on.
class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class MessageType : uint16_t {
  // Handshake over TCP.
  kHello = 1,    // dialling side: who I am and whom I want
  kWelcome = 2,  // listening side: who I am and where my Unix socket is
  kReject = 3,   // either side: why not
  // Handshake over the Unix socket.
  kIntroduce = 4,  // token and nonce
  kVerdict = 5,    // whether this side can read the other's memory and takes the link
  kStage = 6,      // over NIXL, in place of Introduce: token, agent and staging memory
  // Requests on a link, each answered by the message after it or by kFailure.
  kResolve = 16,  // destination of a pull: where are the bytes of this cache
  kResolved = 17,
  kFinish = 18,  // destination of a pull: I have copied
  kFinished = 19,
  kPush = 20,  // source of a push: copy these runs from my memory
  kPushed = 21,
  kUnlink = 22,  // both sides forget the link
  kUnlinked = 23,
  kFailure = 24,  // status and sentence
  kFetch = 26,    // destination, over NIXL: write these bytes into a staging slot of mine
  kFetched = 27,
  // Notices on a link, which nobody answers. Each is in force for what comes after it.
  kShare = 32,     // source: these addresses are bytes of the file whose descriptor comes along
  kWithdraw = 33,  // source: they are so no more
};

constexpr MessageType reply_to(MessageType request) {
  return static_cast<MessageType>(static_cast<uint16_t>(request) + 1);
}

struct FrameHeader {
  MessageType type = MessageType::kFailure;
  uint32_t payload_bytes = 0;
  uint64_t call_id = 0;
};

struct Frame {
  MessageType type = MessageType::kFailure;
  uint64_t call_id = 0;
  Bytes payload;
};

class WireWriter {
 public:
  void u8(uint8_t value) { number(value); }
  void u16(uint16_t value) { number(value); }
  void u32(uint32_t value) { number(value); }
  void u64(uint64_t value) { number(value); }
  void text(const std::string& value);  // cut to kMaxText bytes
  void raw(const uint8_t* data, size_t size) { bytes_.insert(bytes_.end(), data, data + size); }
  void u64_list(const std::vector<uint64_t>& values);
  Bytes take() { return std::move(bytes_); }

 private:
  template <typename T>
  void number(T value) {
    size_t start = bytes_.size();
    bytes_.resize(start + sizeof(T));
    for (size_t i = 0; i < sizeof(T); ++i) {
      bytes_[start + i] = static_cast<uint8_t>(static_cast<uint64_t>(value) >> (8 * i));
    }
  }

  Bytes bytes_;
};

// Throws WireError instead of reading past the end.
class WireReader {
 public:
  WireReader(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  explicit WireReader(const Bytes& bytes) : WireReader(bytes.data(), bytes.size()) {}

  uint8_t u8() { return number<uint8_t>(); }
  uint16_t u16() { return number<uint16_t>(); }
  uint32_t u32() { return number<uint32_t>(); }
  uint64_t u64() { return number<uint64_t>(); }
  bool flag();
  std::string text();
  void raw(uint8_t* out, size_t size);
  std::vector<uint64_t> u64_list();
  // The number of elements that follow, checked against the bytes that are there.
  size_t count(size_t element_bytes);
  void expect_end() const;

 private:
  template <typename T>
  T number() {
    const uint8_t* bytes = advance(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
    return static_cast<T>(value);
  }
  const uint8_t* advance(size_t size);

  const uint8_t* data_;
  size_t left_;
};

Bytes encode_frame(MessageType type, uint64_t call_id, const Bytes& payload);

// `data` holds kFrameHeaderBytes. Throws WireError for another magic or version or a longer
// payload.
FrameHeader decode_header(const uint8_t* data, uint32_t max_payload);

}  // namespace llmdd
