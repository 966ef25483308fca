#include "engine/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>

#include "common/log.h"
#include "common/socket_io.h"
#include "engine/messages.h"

namespace llmdd {
namespace {

constexpr size_t kReceiveBytes = 64 << 10;
// A peer that sends requests and reads no replies must not fill this process's memory.
constexpr size_t kMaxOutgoing = 2 * size_t{kMaxPayload};

std::string identity(uint64_t cluster_id) { return "cluster " + std::to_string(cluster_id) + ": "; }

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Link::Link(uint64_t cluster_id, UniqueFd socket, PeerProcess peer, RequestHandler& handler,
           Bytes first_message)
    : cluster_id_(cluster_id),
      socket_(std::move(socket)),
      peer_(std::move(peer)),
      handler_(handler),
      outgoing_(std::move(first_message)) {}

// No shutdown here: a link that was never filed leaves its socket to the handshake, which says why.
Link::~Link() {
  end(State::kUnlinked, "destroyed");
  join();
}

void Link::start() {
  std::lock_guard lock(thread_mutex_);
  thread_ = std::thread(&Link::run, this);
}

void Link::join() {
  std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) thread_.join();
}

bool Link::linked() const {
  std::lock_guard lock(mutex_);
  return state_ == State::kLinked;
}

bool Link::hung_up() const { return !linked() || llmdd::hung_up(socket_.get()); }

void Link::throw_if_ended_locked() const {
  if (state_ == State::kUnlinked) {
    throw Error(Status::kFailed, identity(cluster_id_) + "unlinked: " + reason_);
  }
  if (state_ == State::kFailed) {
    throw Error(Status::kFailed, identity(cluster_id_) + "link failed: " + reason_ +
                                     "; unlink_clusters(force=True) and link again");
  }
}

void Link::check() const {
  {
    std::lock_guard lock(mutex_);
    throw_if_ended_locked();
  }
  if (llmdd::hung_up(socket_.get())) {
    throw Error(Status::kFailed, identity(cluster_id_) + "the peer closed the link");
  }
}

bool Link::end(State state, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kLinked) return false;
    state_ = state;
    reason_ = reason;
  }
  changed_.notify_all();
  wake_.set();
  return true;
}

// The peer sees it at once; close(2) comes with the destructor.
void Link::hang_up() { ::shutdown(socket_.get(), SHUT_RDWR); }

void Link::fail(const std::string& reason) {
  if (!end(State::kFailed, reason)) return;
  hang_up();
  log(LogLevel::kWarning, identity(cluster_id_) + "link failed: " + reason);
}

void Link::forget(const std::string& reason) {
  if (end(State::kUnlinked, reason)) hang_up();
}

Link::Sent Link::start(MessageType request, const Bytes& payload) {
  Sent sent{request, 0, std::make_shared<Pending>()};
  {
    std::lock_guard lock(mutex_);
    throw_if_ended_locked();
    sent.call_id = next_call_id_++;
    pending_.emplace(sent.call_id, sent.pending);
  }
  send(encode_frame(request, sent.call_id, payload));
  return sent;
}

Frame Link::finish(const Sent& sent, const Deadline& deadline) {
  const std::shared_ptr<Pending>& pending = sent.pending;
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline.time(),
                      [&] { return pending->reply || state_ != State::kLinked; });
  pending_.erase(sent.call_id);
  if (!pending->reply) {
    throw_if_ended_locked();
    lock.unlock();
    fail("the peer did not answer in time");
    throw Error(Status::kTimeout, identity(cluster_id_) + "the peer did not answer in time");
  }
  lock.unlock();
  try {
    return checked_reply(sent.request, std::move(*pending->reply));
  } catch (const WireError& error) {
    fail(error.what());
    throw Error(Status::kFailed, identity(cluster_id_) + error.what());
  }
}

Frame Link::checked_reply(MessageType request, Frame reply) const {
  if (reply.type == MessageType::kFailure) {
    Outcome outcome = Outcome::decode(reply.payload);
    throw Error(outcome.failure(), identity(cluster_id_) + outcome.text);
  }
  if (reply.type != reply_to(request)) {
    throw WireError("the answer is of message type " + std::to_string(int(reply.type)) +
                    ", not of type " + std::to_string(int(reply_to(request))));
  }
  return reply;
}

void Link::reply(MessageType type, uint64_t call_id, const Bytes& payload) {
  send(encode_frame(type, call_id, payload));
}

void Link::send(const Bytes& frame) {
  bool fits = false;
  bool unsent = false;
  {
    std::lock_guard lock(send_mutex_);
    fits = outgoing_.size() + frame.size() <= kMaxOutgoing;
    if (fits) {
      outgoing_.insert(outgoing_.end(), frame.begin(), frame.end());
      flush_locked();
      unsent = !outgoing_.empty();
    }
  }
  if (!fits) fail("the peer does not read its messages");
  if (unsent) wake_.set();
}

// What the socket does not take now, the link's thread sends when poll(2) says so.
void Link::flush_locked() {
  size_t sent = 0;
  while (sent < outgoing_.size()) {
    ssize_t count = ::send(socket_.get(), outgoing_.data() + sent, outgoing_.size() - sent,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && would_block(errno)) break;
    if (count < 0) {  // the receiving side of the socket tells the thread why
      sent = outgoing_.size();
      break;
    }
    sent += static_cast<size_t>(count);
  }
  outgoing_.erase(outgoing_.begin(), outgoing_.begin() + static_cast<ptrdiff_t>(sent));
}

bool Link::wants_to_send() const {
  std::lock_guard lock(send_mutex_);
  return !outgoing_.empty();
}

void Link::run() {
  try {
    while (linked()) step();
  } catch (const std::exception& error) {
    fail(error.what());
  }
  thread_done_ = true;
}

void Link::step() {
  short events = static_cast<short>(POLLIN | POLLRDHUP | (wants_to_send() ? POLLOUT : 0));
  std::array<pollfd, 3> fds{
      {{socket_.get(), events, 0}, {wake_.fd(), POLLIN, 0}, {peer_.pidfd.get(), POLLIN, 0}}};
  if (::poll(fds.data(), fds.size(), -1) < 0) {
    if (errno == EINTR) return;
    throw Error(Status::kFailed, "poll failed: " + errno_text(errno));
  }
  if (fds[1].revents != 0) wake_.clear();
  if ((fds[0].revents & POLLOUT) != 0) {
    std::lock_guard lock(send_mutex_);
    flush_locked();
  }
  if ((fds[0].revents & (POLLIN | POLLRDHUP | POLLHUP | POLLERR)) != 0) return receive();
  if (fds[2].revents != 0) throw Error(Status::kFailed, "the peer process ended");
}

void Link::receive() {
  std::array<uint8_t, kReceiveBytes> buffer;
  ssize_t count = ::recv(socket_.get(), buffer.data(), buffer.size(), MSG_DONTWAIT);
  if (count < 0 && would_block(errno)) return;
  if (count <= 0) throw Error(Status::kFailed, "the peer closed the link");
  incoming_.insert(incoming_.end(), buffer.begin(), buffer.begin() + count);
  dispatch_frames();
}

void Link::dispatch_frames() {
  size_t used = 0;
  while (incoming_.size() - used >= kFrameHeaderBytes && linked()) {
    FrameHeader header = decode_header(incoming_.data() + used, kMaxPayload);
    size_t whole = kFrameHeaderBytes + header.payload_bytes;
    if (incoming_.size() - used < whole) break;
    auto payload = incoming_.begin() + static_cast<ptrdiff_t>(used + kFrameHeaderBytes);
    Frame frame{header.type, header.call_id, Bytes(payload, payload + header.payload_bytes)};
    used += whole;
    dispatch(std::move(frame));
  }
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<ptrdiff_t>(used));
}

void Link::dispatch(Frame frame) {
  switch (frame.type) {
    case MessageType::kResolve:
    case MessageType::kFinish:
    case MessageType::kPush:
    case MessageType::kUnlink:
      return handler_.handle(*this, frame);
    case MessageType::kResolved:
    case MessageType::kFinished:
    case MessageType::kPushed:
    case MessageType::kUnlinked:
    case MessageType::kFailure:
      break;
    default:
      throw WireError("unexpected message type " + std::to_string(int(frame.type)));
  }
  bool unlinked = frame.type == MessageType::kUnlinked;
  deliver(std::move(frame));
  if (unlinked) forget("by this process");
}

void Link::deliver(Frame frame) {
  std::lock_guard lock(mutex_);
  auto pending = pending_.find(frame.call_id);
  if (pending == pending_.end()) return;  // its caller has stopped waiting
  pending->second->reply = std::move(frame);
  changed_.notify_all();
}

}  // namespace llmdd
