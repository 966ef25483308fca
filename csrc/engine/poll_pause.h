// The pause between two looks at something that NIXL moves only while it is looked at.
#pragma once

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "common/clock.h"

namespace llmdd {

// First other threads may run; after a while the thread sleeps, longer and longer.
class PollPause {
 public:
  void pause() {
    Clock::duration waited = Clock::now() - begin_;
    if (waited < kYieldTime) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::min<Clock::duration>(waited / 8, kLongest));
    }
  }

  // Something has happened.
  void reset() { begin_ = Clock::now(); }

 private:
  static constexpr std::chrono::microseconds kYieldTime{200};
  static constexpr std::chrono::milliseconds kLongest{2};
  Clock::time_point begin_ = Clock::now();
};

}  // namespace llmdd
