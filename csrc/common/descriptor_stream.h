// The two directions of a Unix stream socket on which descriptors travel with bytes (SCM_RIGHTS).
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "common/unique_fd.h"

namespace llmdd {

// Bytes that wait to be sent. Not thread-safe.
class OutgoingStream {
 public:
  explicit OutgoingStream(std::vector<uint8_t> bytes = {}) : bytes_(std::move(bytes)) {}

  size_t size() const { return bytes_.size(); }
  bool empty() const { return bytes_.empty(); }
  void add(const std::vector<uint8_t>& bytes);
  // The descriptor arrives with the first of these bytes.
  void add(const std::vector<uint8_t>& bytes, UniqueFd fd);
  // Sends what the socket takes now. After an error the socket is shut down; its reader notices.
  void flush(int socket);

 private:
  struct Attached {
    size_t position = 0;  // in bytes_
    UniqueFd fd;
  };

  ssize_t send_some(int socket, size_t from) const;

  std::vector<uint8_t> bytes_;
  std::deque<Attached> attached_;  // ascending
};

// Reads once without waiting and appends to `bytes` and `fds`: an empty descriptor stands for one
// that this process had no room for. As recv(2); the caller bounds `fds`.
ssize_t receive_with_fds(int socket, std::vector<uint8_t>& bytes, std::deque<UniqueFd>& fds);

}  // namespace llmdd
