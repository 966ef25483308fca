#include "engine/peer_process.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <string>

#include "common/socket_io.h"
#include "engine/prober.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace llmdd {
namespace {

ucred credentials_of(int unix_socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    throw Error(Status::kLinkFailed, "SO_PEERCRED failed: " + errno_text(errno));
  }
  return credentials;
}

UniqueFd pidfd_of(int unix_socket, pid_t pid) {
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (::getsockopt(unix_socket, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) {
    return UniqueFd(pidfd);
  }
  // Older kernels: the number could have been reused only if the peer had ended, and then the
  // socket is hung up, which is checked after opening.
  UniqueFd opened(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!opened) throw Error(Status::kLinkFailed, probe_sentence(pid, errno));
  if (hung_up(unix_socket)) throw Error(Status::kLinkFailed, "the peer closed the connection");
  return opened;
}

}  // namespace

bool PeerProcess::ended() const {
  pollfd state{pidfd.get(), POLLIN, 0};
  return ::poll(&state, 1, 0) > 0;
}

PeerProcess identify_peer(int unix_socket) {
  ucred credentials = credentials_of(unix_socket);
  if (credentials.uid != ::geteuid()) {
    throw Error(Status::kLinkFailed, "the peer runs as user " + std::to_string(credentials.uid) +
                                         ", this process as " + std::to_string(::geteuid()) +
                                         "; run both as the same user");
  }
  if (credentials.pid == 0) throw Error(Status::kLinkFailed, probe_sentence(0, ESRCH));
  return {credentials.pid, pidfd_of(unix_socket, credentials.pid)};
}

}  // namespace llmdd
