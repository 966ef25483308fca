#include "common/socket_io.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

namespace llmdd {
namespace {

// Callers beyond it are told nothing and try again after a second, the honest ones, too.
constexpr int kBacklog = 1024;

constexpr int kKeepaliveIdleS = 10;
constexpr int kKeepaliveIntervalS = 5;
constexpr int kKeepaliveProbes = 3;

UniqueFd new_socket(int family) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw Error(Status::kFailed, "socket failed: " + errno_text(errno));
  return fd;
}

sockaddr_in tcp_address(const std::string& ip, uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::inet_pton(AF_INET, ip.c_str(), &address.sin_addr) != 1) {
    throw Error(Status::kParamInvalid, "'" + ip + "' is not an IPv4 address");
  }
  return address;
}

sockaddr_un unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    throw Error(Status::kLinkFailed, "socket path '" + path + "' is empty or too long");
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

void dial(int fd, const sockaddr* address, socklen_t size, const WaitLimit& limit) {
  if (::connect(fd, address, size) == 0) return;
  // A Unix socket with a full backlog answers EAGAIN; there is nothing to poll for in that case.
  if (errno != EINPROGRESS) throw Error(Status::kLinkFailed, errno_text(errno));
  wait_ready(fd, POLLOUT, limit, "connecting");
  int error = 0;
  socklen_t error_size = sizeof(error);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_size);
  if (error != 0) throw Error(Status::kLinkFailed, errno_text(error));
}

bool transient(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

std::string errno_text(int error) {
  char buffer[128] = {};
  // The GNU version returns the text and need not use the buffer.
  return ::strerror_r(error, buffer, sizeof(buffer));
}

void wait_ready(int fd, short events, const WaitLimit& limit, const char* what) {
  while (true) {
    pollfd fds[2] = {{fd, events, 0}, {limit.stop_fd, POLLIN, 0}};
    int count = ::poll(fds, 2, limit.deadline.remaining_ms());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) throw Error(Status::kFailed, "poll failed: " + errno_text(errno));
    if (fds[1].revents != 0) throw Error(Status::kFailed, "the engine is being finalized");
    if (fds[0].revents != 0) return;
    if (limit.deadline.passed()) {
      throw Error(Status::kTimeout, std::string("no answer in time while ") + what);
    }
  }
}

void read_exact(int fd, void* data, size_t size, const WaitLimit& limit) {
  auto* cursor = static_cast<uint8_t*>(data);
  while (size > 0) {
    wait_ready(fd, POLLIN, limit, "waiting for the peer's message");
    ssize_t count = ::recv(fd, cursor, size, MSG_DONTWAIT);
    if (count < 0 && transient(errno)) continue;
    if (count < 0) throw Error(Status::kLinkFailed, errno_text(errno));
    if (count == 0) throw Error(Status::kLinkFailed, "the peer closed the connection");
    cursor += count;
    size -= static_cast<size_t>(count);
  }
}

void write_all(int fd, const void* data, size_t size, const WaitLimit& limit) {
  auto* cursor = static_cast<const uint8_t*>(data);
  while (size > 0) {
    wait_ready(fd, POLLOUT, limit, "sending to the peer");
    ssize_t count = ::send(fd, cursor, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0 && transient(errno)) continue;
    if (count < 0) throw Error(Status::kLinkFailed, errno_text(errno));
    cursor += count;
    size -= static_cast<size_t>(count);
  }
}

UniqueFd dial_tcp(const std::string& ip, uint16_t port, const WaitLimit& limit) {
  sockaddr_in address = tcp_address(ip, port);
  UniqueFd fd = new_socket(AF_INET);
  int one = 1;
  ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  dial(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address), limit);
  return fd;
}

UniqueFd listen_tcp(const std::string& ip, uint16_t port) {
  sockaddr_in address = tcp_address(ip, port);
  UniqueFd fd = new_socket(AF_INET);
  int one = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    throw Error(Status::kFailed, "cannot listen on " + ip + ":" + std::to_string(port) + ": " +
                                     errno_text(errno) + "; choose a free port of this host");
  }
  return fd;
}

uint16_t bound_port(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw Error(Status::kFailed, "getsockname failed: " + errno_text(errno));
  }
  return ntohs(address.sin_port);
}

UniqueFd dial_unix(const std::string& path, const WaitLimit& limit) {
  sockaddr_un address = unix_address(path);
  UniqueFd fd = new_socket(AF_UNIX);
  dial(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address), limit);
  return fd;
}

UniqueFd listen_unix(const std::string& path) {
  sockaddr_un address = unix_address(path);
  UniqueFd fd = new_socket(AF_UNIX);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(fd.get(), kBacklog) != 0) {
    throw Error(Status::kFailed, "cannot listen on " + path + ": " + errno_text(errno));
  }
  return fd;
}

UniqueFd accept_one(int fd) {
  return UniqueFd(::accept4(fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

void prepare_connection(int fd) {
  auto set = [fd](int level, int name, int value) {
    ::setsockopt(fd, level, name, &value, sizeof(value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleS);
  set(IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalS);
  set(IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT,
      1000 * (kKeepaliveIdleS + kKeepaliveProbes * kKeepaliveIntervalS));
}

bool readable(int fd) {
  pollfd state{fd, POLLIN, 0};
  return ::poll(&state, 1, 0) > 0;
}

bool hung_up(int fd) {
  pollfd state{fd, POLLRDHUP, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace llmdd
