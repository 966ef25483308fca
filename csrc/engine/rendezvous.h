// A Unix socket in a private directory, for one handshake: gone from the file system when it is
// over.
#pragma once

#include <string>

#include "common/unique_fd.h"

namespace llmdd {

class Rendezvous {
 public:
  // The directory has mode 0700 and lies in TMPDIR, or in /tmp if that path is too long for a
  // socket.
  Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous();

  const std::string& socket_path() const { return socket_path_; }
  int fd() const { return listener_.get(); }

 private:
  std::string directory_;
  std::string socket_path_;
  UniqueFd listener_;
};

}  // namespace llmdd
