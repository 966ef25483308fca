// An eventfd that wakes a thread sleeping in poll(2).
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdint>

#include "common/status.h"
#include "common/unique_fd.h"

namespace llmdd {

class SignalFd {
 public:
  SignalFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (!fd_) throw Error(Status::kFailed, "eventfd failed: the process is out of descriptors");
  }

  int fd() const { return fd_.get(); }

  void set() const {
    uint64_t one = 1;
    // A full counter means that the signal is already set.
    [[maybe_unused]] ssize_t written = ::write(fd_.get(), &one, sizeof(one));
  }

  void clear() const {
    uint64_t count = 0;
    [[maybe_unused]] ssize_t read_bytes = ::read(fd_.get(), &count, sizeof(count));
  }

 private:
  UniqueFd fd_;
};

}  // namespace llmdd
