// Socket calls that end by a deadline or when the engine stops; no call here blocks without a
// bound.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/clock.h"
#include "common/status.h"
#include "common/unique_fd.h"

namespace llmdd {

// The limits of one waiting call: its deadline, and a descriptor that becomes readable on shutdown.
struct WaitLimit {
  Deadline deadline;
  int stop_fd;
};

// Throws Error(kTimeout) at the deadline and Error(kFailed) when stopped.
void wait_ready(int fd, short events, const WaitLimit& limit, const char* what);

void read_exact(int fd, void* data, size_t size, const WaitLimit& limit);
void write_all(int fd, const void* data, size_t size, const WaitLimit& limit);

UniqueFd dial_tcp(const std::string& ip, uint16_t port, const WaitLimit& limit);
UniqueFd listen_tcp(const std::string& ip, uint16_t port);
uint16_t bound_port(int fd);

UniqueFd dial_unix(const std::string& path, const WaitLimit& limit);
UniqueFd listen_unix(const std::string& path);

// An empty result means that nobody is waiting any more (the caller polls first).
UniqueFd accept_one(int fd);

// For a connection that may be idle for long: messages leave at once, and a peer whose host is gone
// is noticed within half a minute. Without effect on a Unix socket.
void prepare_connection(int fd);

// Whether there is something to read, or the end of the stream.
bool readable(int fd);
bool hung_up(int fd);
std::string errno_text(int error);

}  // namespace llmdd
