// The process at the other end of a Unix socket.
#pragma once

#include <sys/types.h>

#include "common/unique_fd.h"

namespace llmdd {

// `pid` is the peer's number in this process's PID namespace; `pidfd` becomes readable when it
// ends, and keeps telling the truth when the number is given to another process.
struct PeerProcess {
  pid_t pid = 0;
  UniqueFd pidfd;

  bool ended() const;
};

// Reads the kernel's own record of the peer. Throws Error(kLinkFailed) with a sentence for another
// user or an invisible process.
PeerProcess identify_peer(int unix_socket);

}  // namespace llmdd
