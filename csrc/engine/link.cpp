#include "engine/link.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>

#include "common/log.h"
#include "common/socket_io.h"
#include "common/start_thread.h"
#include "engine/messages.h"

namespace llmdd {
namespace {

// About two wake-ups of a thread whose processor has gone idle, which is what a short call saves.
constexpr std::chrono::microseconds kLookTime{50};
// The peer's thread has to wake up and copy first.
constexpr std::chrono::microseconds kLongLookTime{250};
// A peer that sends requests and reads no replies must not fill this process's memory.
constexpr size_t kMaxOutgoing = 2 * size_t{kMaxPayload};
// Nor must one that sends descriptors without a message to them use up this process's.
constexpr size_t kMaxIncomingFds = 16;

std::string identity(uint64_t cluster_id) { return "cluster " + std::to_string(cluster_id) + ": "; }

// On one processor, who looks keeps the peer from answering.
bool looking_pays() {
  static const bool several_processors = [] {
    cpu_set_t allowed;
    return ::sched_getaffinity(0, sizeof(allowed), &allowed) == 0 && CPU_COUNT(&allowed) > 1;
  }();
  return several_processors;
}

bool is_request(MessageType type) {
  switch (type) {
    case MessageType::kResolve:
    case MessageType::kFinish:
    case MessageType::kPush:
    case MessageType::kUnlink:
    case MessageType::kFetch:
      return true;
    default:
      return false;
  }
}

bool is_reply(MessageType type) {
  switch (type) {
    case MessageType::kResolved:
    case MessageType::kFinished:
    case MessageType::kPushed:
    case MessageType::kUnlinked:
    case MessageType::kFailure:
    case MessageType::kFetched:
      return true;
    default:
      return false;
  }
}

bool is_notice(MessageType type) {
  return type == MessageType::kShare || type == MessageType::kWithdraw;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

Link::Link(Greeted peer, RequestHandler& handler, Bytes first_message)
    : cluster_id_(peer.cluster_id),
      socket_(std::move(peer.socket)),
      peer_(std::move(peer.process)),
      memory_(std::move(peer.memory)),
      peer_maps_shared_(peer.maps_shared),
      handler_(handler),
      outgoing_(std::move(first_message)) {
  memory_->attach(*this, handler);
}

// No shutdown here: a link that was never filed leaves its socket to the handshake, which says why.
Link::~Link() {
  end(State::kUnlinked, "destroyed");
  join();
}

void Link::start() {
  std::lock_guard lock(thread_mutex_);
  try {
    thread_ = start_thread("the link's", Status::kLinkFailed, &Link::run, this);
  } catch (const Error&) {
    thread_done_ = true;
    throw;
  }
}

void Link::join() {
  std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) thread_.join();
  memory_->end();
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
  if (parting_) return forget("by the peer");
  if (!end(State::kFailed, reason)) return;
  hang_up();
  log(LogLevel::kWarning, identity(cluster_id_) + "link failed: " + reason);
}

void Link::forget(const std::string& reason) {
  if (end(State::kUnlinked, reason)) hang_up();
}

Frame Link::call(MessageType request, const Bytes& payload, const Deadline& deadline) {
  Sent sent = start(request, payload);
  if (looking_pays()) look_for_reply(*sent.pending, kLookTime);
  return finish(sent, deadline);
}

void Link::look(const Sent& sent) {
  if (looking_pays()) look_for_reply(*sent.pending, kLongLookTime);
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
  return checked_or_fail(sent.request, std::move(*pending->reply));
}

std::optional<Frame> Link::try_finish(const Sent& sent) {
  receive_replies();
  std::unique_lock lock(mutex_);
  if (!sent.pending->reply) {
    throw_if_ended_locked();
    return std::nullopt;
  }
  pending_.erase(sent.call_id);
  lock.unlock();
  return checked_or_fail(sent.request, std::move(*sent.pending->reply));
}

Frame Link::checked_or_fail(MessageType request, Frame reply) {
  try {
    return checked_reply(request, std::move(reply));
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
      outgoing_.add(frame);
      outgoing_.flush(socket_.get());
      unsent = !outgoing_.empty();
    }
  }
  if (!fits) fail("the peer does not read its messages");
  if (unsent) wake_.set();
}

void Link::retract_locked(uint64_t file_id) {
  if (offered_.erase(file_id) == 0) return;
  outgoing_.add(encode_frame(MessageType::kWithdraw, 0, Withdraw{file_id}.encode()));
}

void Link::offer(const SharedFiles& files) {
  if (!peer_maps_shared_) return;
  std::lock_guard lock(send_mutex_);
  for (const auto& file : files) {
    if (file->withdrawn() || offered_.count(file->id()) != 0) continue;
    // Its memory may be what another file held, whose end is still to be told.
    for (auto offered = offered_.begin(); offered != offered_.end();) {
      auto [id, old] = *offered++;
      std::shared_ptr<SharedFile> live = old.lock();
      if (!live || live->withdrawn()) retract_locked(id);
    }
    UniqueFd fd(::fcntl(file->fd(), F_DUPFD_CLOEXEC, 0));
    if (!fd) return;  // out of descriptors: the peer copies by other means
    offered_[file->id()] = file;
    Bytes share = Share{file->id(), file->size(), file->ranges()}.encode();
    outgoing_.add(encode_frame(MessageType::kShare, 0, share), std::move(fd));
  }
}

void Link::withdraw(uint64_t file_id) {
  {
    std::lock_guard lock(send_mutex_);
    retract_locked(file_id);
    outgoing_.flush(socket_.get());
    if (outgoing_.empty()) return;
  }
  wake_.set();
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
  {
    std::lock_guard lock(receive_mutex_);
    incoming_fds_.clear();
  }
  // A dead peer's memory would live on in this process.
  memory_->let_go();
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
    outgoing_.flush(socket_.get());
  }
  bool readable = (fds[0].revents & (POLLIN | POLLRDHUP | POLLHUP | POLLERR)) != 0;
  // A caller that looked for its reply wakes the thread for the request that it found.
  if (readable || fds[1].revents != 0) return receive();
  if (fds[2].revents != 0) throw Error(Status::kFailed, "the peer process ended");
}

// What has been read before counts, also when the peer has closed the link since.
void Link::receive() {
  for (bool read = false; linked();) {
    std::optional<Frame> frame;
    {
      std::lock_guard lock(receive_mutex_);
      frame = take_frame();
      if (frame && is_notice(frame->type)) {
        take_notice(*frame);
        continue;
      }
      if (!frame && read) return;
      if (!frame) {
        if (read_socket() == 0) throw Error(Status::kFailed, "the peer closed the link");
        read = true;
        continue;
      }
    }
    bool resolve = frame->type == MessageType::kResolve;
    dispatch(std::move(*frame));
    if (resolve && looking_pays()) look_for_request();
  }
}

// Positive: bytes came; 0: the peer closed the link; negative: there is nothing now.
ssize_t Link::read_socket() {
  ssize_t count = receive_with_fds(socket_.get(), incoming_, incoming_fds_);
  if (count < 0) return would_block(errno) ? -1 : 0;
  return count;
}

// Under receive_mutex_, so that whoever handles a later frame finds it in force.
void Link::take_notice(const Frame& frame) {
  UniqueFd fd;
  if (frame.type == MessageType::kShare && !incoming_fds_.empty()) {
    fd = std::move(incoming_fds_.front());
    incoming_fds_.pop_front();
  }
  memory_->notice(frame, std::move(fd));
}

std::optional<Frame> Link::take_frame() {
  if (incoming_fds_.size() > kMaxIncomingFds) throw WireError("the peer sends many descriptors");
  if (incoming_.size() < kFrameHeaderBytes) return std::nullopt;
  FrameHeader header = decode_header(incoming_.data(), kMaxPayload);
  size_t whole = kFrameHeaderBytes + header.payload_bytes;
  if (incoming_.size() < whole) return std::nullopt;
  auto payload = incoming_.begin() + kFrameHeaderBytes;
  Frame frame{header.type, header.call_id, Bytes(payload, payload + header.payload_bytes)};
  incoming_.erase(incoming_.begin(), incoming_.begin() + static_cast<ptrdiff_t>(whole));
  return frame;
}

bool Link::reply_is_next() const {
  if (incoming_.size() < kFrameHeaderBytes) return false;
  MessageType type = decode_header(incoming_.data(), kMaxPayload).type;
  return is_reply(type) || is_notice(type);
}

// On a caller's thread: replies and notices only, since a request may mean a long copy.
void Link::receive_replies() {
  std::string breach;
  {
    std::unique_lock lock(receive_mutex_, std::try_to_lock);
    if (!lock) return;
    try {
      // What waits for the link's thread is read no further: it would grow without a bound.
      if (incoming_.size() >= kFrameHeaderBytes && !reply_is_next()) return;
      if (read_socket() <= 0) return;
      while (reply_is_next()) {
        std::optional<Frame> frame = take_frame();
        if (!frame) break;
        if (is_notice(frame->type)) {
          take_notice(*frame);
        } else {
          dispatch(std::move(*frame));
        }
      }
    } catch (const WireError& error) {
      breach = error.what();
    }
    if (!incoming_.empty()) wake_.set();
  }
  if (!breach.empty()) fail(breach);  // which logs: without a mutex
}

void Link::look_for_reply(const Pending& pending, std::chrono::microseconds how_long) {
  Clock::time_point end = Clock::now() + how_long;
  do {
    receive_replies();
    std::lock_guard lock(mutex_);
    if (pending.reply || state_ != State::kLinked) return;
  } while (Clock::now() < end);
}

void Link::look_for_request() {
  Clock::time_point end = Clock::now() + kLookTime;
  do {
    std::lock_guard lock(receive_mutex_);
    if (!incoming_.empty() || read_socket() >= 0) return;
  } while (Clock::now() < end && linked());
}

void Link::dispatch(Frame frame) {
  if (is_request(frame.type)) {
    if (!memory_->take(frame)) handler_.handle(*this, frame);
    return;
  }
  if (!is_reply(frame.type)) {
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
