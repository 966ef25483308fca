#include "common/descriptor_stream.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>

namespace llmdd {
namespace {

constexpr size_t kReceiveBytes = 64 << 10;
constexpr size_t kMaxFdsAtOnce = 8;  // an honest peer sends one

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

void take_fds(const msghdr& message, std::deque<UniqueFd>& fds) {
  auto* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
    size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) fds.emplace_back();
}

}  // namespace

void OutgoingStream::add(const std::vector<uint8_t>& bytes) {
  bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
}

void OutgoingStream::add(const std::vector<uint8_t>& bytes, UniqueFd fd) {
  attached_.push_back({bytes_.size(), std::move(fd)});
  add(bytes);
}

// Up to the next descriptor, which goes with the bytes behind it.
ssize_t OutgoingStream::send_some(int socket, size_t from) const {
  auto next = attached_.begin();
  bool attached = next != attached_.end() && next->position == from;
  int fd = attached ? (next++)->fd.get() : -1;
  size_t end = next == attached_.end() ? bytes_.size() : next->position;
  iovec data{const_cast<uint8_t*>(bytes_.data()) + from, end - from};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (attached) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  return ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void OutgoingStream::flush(int socket) {
  size_t sent = 0;
  while (sent < bytes_.size()) {
    ssize_t count = send_some(socket, sent);
    if (count < 0 && would_block(errno)) break;
    if (count < 0) {
      ::shutdown(socket, SHUT_RDWR);  // as by the peer, so that the reader sees it
      sent = bytes_.size();
      break;
    }
    sent += static_cast<size_t>(count);
    while (!attached_.empty() && attached_.front().position < sent) attached_.pop_front();
  }
  if (sent == bytes_.size()) attached_.clear();
  for (Attached& attached : attached_) attached.position -= sent;
  bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<ptrdiff_t>(sent));
}

ssize_t receive_with_fds(int socket, std::vector<uint8_t>& bytes, std::deque<UniqueFd>& fds) {
  std::array<uint8_t, kReceiveBytes> buffer;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxFdsAtOnce * sizeof(int))> control;
  iovec data{buffer.data(), buffer.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t count = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (count < 0) return count;
  take_fds(message, fds);
  bytes.insert(bytes.end(), buffer.begin(), buffer.begin() + count);
  return count;
}

}  // namespace llmdd
