// Requests of a peer that is linked, answered by the real service on real tables.
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "check.h"
#include "engine/service.h"
#include "mutate/messages.h"
#include "mutate/mutator.h"
#include "mutate/targets.h"

namespace llmdd::test {
namespace {

constexpr uint64_t kTensors = 4;
constexpr uint64_t kRows = 8;
constexpr uint64_t kRowBytes = 64;
constexpr uint64_t kTensorBytes = kRows * kRowBytes;
constexpr uint64_t kGap = 512;  // between tensors; never written
constexpr uint64_t kBlocksModel = 1;
constexpr uint8_t kGapFill = 0xA5;
const std::vector<MessageType> kRequests = {MessageType::kResolve, MessageType::kFinish,
                                            MessageType::kPush,    MessageType::kPush,
                                            MessageType::kPush,    MessageType::kUnlink};

// Tensors with gaps between them, which show a write that went astray.
class Arena {
 public:
  Arena() : bytes_((kTensors + 1) * kGap + kTensors * kTensorBytes, kGapFill) {}

  std::vector<uint64_t> tensors() {
    std::vector<uint64_t> addrs;
    for (uint64_t i = 0; i < kTensors; ++i) {
      addrs.push_back(reinterpret_cast<uint64_t>(bytes_.data()) + kGap + i * (kGap + kTensorBytes));
    }
    return addrs;
  }

  void check_gaps() const {
    for (uint64_t i = 0; i <= kTensors; ++i) {
      const uint8_t* gap = bytes_.data() + i * (kGap + kTensorBytes);
      for (uint64_t byte = 0; byte < kGap; ++byte) LLMDD_CHECK(gap[byte] == kGapFill);
    }
  }

 private:
  Bytes bytes_;
};

CacheSpec spec_of(const std::vector<uint64_t>& addrs, bool is_blocks) {
  CacheSpec spec;
  spec.shape = {kRows, kRowBytes};
  spec.element_bytes = 1;
  spec.is_blocks = is_blocks;
  spec.remote_accessible = true;
  spec.tensor_addrs = addrs;
  return spec;
}

struct SocketPair {
  UniqueFd ours;
  UniqueFd theirs;

  SocketPair() {
    int fds[2];
    LLMDD_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    ours = UniqueFd(fds[0]);
    theirs = UniqueFd(fds[1]);
  }
};

// A cluster whose peer is this process itself.
struct Victim {
  Arena source;
  Arena blocks;
  Arena rows;
  CacheTable caches;
  ReservationTable reservations;
  LinkTable links{1};
  Service service;
  uint64_t rows_id = 0;
  uint64_t token = 0;

  explicit Victim(bool remote_access) : service(caches, reservations, links, remote_access) {
    int64_t id = caches.add(spec_of(blocks.tensors(), true), {}, kBlocksModel);
    std::vector<RowKey> keys = {{1, RowKey::kInvalidId, 1}};
    rows_id = static_cast<uint64_t>(caches.add(spec_of(rows.tensors(), false), keys, std::nullopt));
    token = reservations.open(caches.get(id), {1, 2, 5});
  }

  void check_memory() const {
    for (const Arena* arena : {&source, &blocks, &rows}) arena->check_gaps();
  }
};

// Mostly one of the victim's caches, so that much of what is pushed passes the first checks.
void aim(Push& push, Victim& victim, Random& random) {
  if (random.one_in(6)) return;
  push.target = {KeyKind::kBlocks, 0, kBlocksModel, 0};
  if (!push.to_blocks) {
    uint64_t row = random.one_in(2) ? kRows - 1 : random.below(kRows + 1);
    push.target = {KeyKind::kIdAndIndex, victim.rows_id, 0, row};
  }
  if (!push.dst_addrs.empty()) push.dst_addrs = victim.rows.tensors();
  if (push.token != 0 && !random.one_in(3)) push.token = victim.token;
  if (push.dst_layers && random.one_in(2)) push.src_addrs.resize(2);
  if (!random.one_in(4)) push.dst_layers.reset();
}

Frame random_request(Victim& victim, Random& random) {
  Frame frame{random.pick(kRequests), random.next(), {}};
  if (frame.type == MessageType::kPush) {
    Push push = random_push(random, victim.source.tensors());
    aim(push, victim, random);
    frame.payload = push.encode();
  } else if (frame.type != MessageType::kUnlink) {
    frame.payload = random_payload(frame.type, random);
  }
  // Most other changes end in the decoder, which try_message is for.
  if (random.one_in(8)) {
    mutate(frame.payload, random);
  } else if (!random.one_in(3)) {
    mutate_number(frame.payload, random);
  }
  return frame;
}

// The next answer that the service has left in the socket.
Frame read_answer(int fd) {
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  LLMDD_CHECK(::recv(fd, bytes.data(), bytes.size(), MSG_WAITALL) ==
              static_cast<ssize_t>(bytes.size()));
  FrameHeader header = decode_header(bytes.data(), kMaxPayload);
  Frame frame{header.type, header.call_id, Bytes(header.payload_bytes)};
  if (frame.payload.empty()) return frame;  // recv(2) would wait for a byte that never comes
  ssize_t count = ::recv(fd, frame.payload.data(), frame.payload.size(), MSG_WAITALL);
  LLMDD_CHECK(count == static_cast<ssize_t>(frame.payload.size()));
  return frame;
}

std::string describe(const Frame& answer) {
  if (answer.type != MessageType::kFailure) {
    return std::string("answered with type ") + letter_of(answer.type);
  }
  return Outcome::decode(answer.payload).text;
}

Greeted own_process_over(UniqueFd socket) {
  PeerProcess process = identify_peer(socket.get());
  auto memory = std::make_unique<ProcessMemory>(process.pid);
  return {2, std::move(socket), std::move(process), std::move(memory)};
}

}  // namespace

std::string try_request(Random& random) {
  Victim victim(random.one_in(2));
  SocketPair pair;
  // Never started: the requests are handled here, one by one.
  Link link(own_process_over(std::move(pair.ours)), victim.service);
  std::string outcome;
  for (uint64_t count = random.between(1, 3); count > 0; --count) {
    Frame request = random_request(victim, random);
    uint64_t call_id = request.call_id;
    try {
      victim.service.handle(link, request);
    } catch (const WireError& error) {
      outcome = error.what();
      break;
    }
    Frame answer = read_answer(pair.theirs.get());
    LLMDD_CHECK(answer.call_id == call_id);
    outcome = describe(answer);
    if (!link.linked()) break;
  }
  victim.check_memory();
  return outcome;
}

std::string try_stream(Random& random) {
  Victim victim(random.one_in(2));
  SocketPair pair;
  Link link(own_process_over(std::move(pair.ours)), victim.service);
  link.start();
  Bytes stream;
  for (uint64_t frames = random.between(1, 4); frames > 0; --frames) {
    Frame request = random_request(victim, random);
    Bytes frame = encode_frame(request.type, request.call_id, request.payload);
    stream.insert(stream.end(), frame.begin(), frame.end());
  }
  if (!random.one_in(3)) mutate(stream, random);
  for (size_t sent = 0; sent < stream.size();) {
    size_t size = std::min<size_t>(random.between(1, 200), stream.size() - sent);
    // A link that has ended takes no more.
    if (::send(pair.theirs.get(), stream.data() + sent, size, MSG_NOSIGNAL) < 0) break;
    sent += size;
  }
  ::shutdown(pair.theirs.get(), SHUT_WR);
  link.join();  // the thread ends with the stream, or at the first frame that is none
  LLMDD_CHECK(!link.linked());
  victim.check_memory();
  try {
    link.check();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace llmdd::test
