#include "shm/fork_guard.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <vector>

namespace llmdd {
namespace {

struct Guarded {
  void* addr;
  uint64_t length;
  uint64_t offset;
  int fd;
};

struct Guard {
  std::mutex mutex;
  std::vector<Guarded> ranges;
};

// Never destroyed: handlers of fork(3) cannot be taken back.
Guard& guard() {
  static Guard* only = new Guard;
  return *only;
}

void before_fork() { guard().mutex.lock(); }
void after_fork() { guard().mutex.unlock(); }

// Only calls that are allowed after the fork of a process with threads.
void in_child() {
  for (const Guarded& range : guard().ranges) {
    ::mmap(range.addr, range.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, range.fd,
           static_cast<off_t>(range.offset));
  }
  guard().ranges.clear();
  guard().mutex.unlock();
}

}  // namespace

std::unique_lock<std::mutex> hold_forks() {
  static const int installed = ::pthread_atfork(before_fork, after_fork, in_child);
  static_cast<void>(installed);
  return std::unique_lock(guard().mutex);
}

void guard_range(const std::unique_lock<std::mutex>&, uint64_t addr, uint64_t length,
                 uint64_t offset, int fd) {
  guard().ranges.push_back({reinterpret_cast<void*>(addr), length, offset, fd});
}

void unguard_file(const std::unique_lock<std::mutex>&, int fd) {
  auto& ranges = guard().ranges;
  ranges.erase(std::remove_if(ranges.begin(), ranges.end(),
                              [fd](const Guarded& range) { return range.fd == fd; }),
               ranges.end());
}

}  // namespace llmdd
