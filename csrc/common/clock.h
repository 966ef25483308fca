// Deadlines on the monotonic clock, which a change of the wall clock does not move.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace llmdd {

using Clock = std::chrono::steady_clock;

// Linux's steady clock is CLOCK_MONOTONIC, which Python's time.monotonic_ns() reads too.
inline int64_t monotonic_ns() {
  auto since = Clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

class Deadline {
 public:
  static Deadline after_ms(int64_t timeout_ms) {
    return Deadline(Clock::now() + std::chrono::milliseconds(timeout_ms));
  }

  Clock::time_point time() const { return time_; }
  bool passed() const { return Clock::now() >= time_; }

  // For poll(2): rounded up, so that a wait never ends just before the deadline.
  int remaining_ms() const {
    auto left = std::chrono::ceil<std::chrono::milliseconds>(time_ - Clock::now()).count();
    return static_cast<int>(std::clamp<int64_t>(left, 0, INT32_MAX));
  }

 private:
  explicit Deadline(Clock::time_point time) : time_(time) {}
  Clock::time_point time_;
};

}  // namespace llmdd
