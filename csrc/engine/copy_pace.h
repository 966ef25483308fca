// Slows copies down to a link's rate, for tests and benches of what happens meanwhile.
#pragma once

#include <chrono>
#include <cstdint>

namespace llmdd {

// Lets every copy of this process take as long as over a link of this rate; 0: as fast as it goes.
void set_copy_rate(uint64_t bytes_per_second);
bool copies_are_slowed();

class CopyPace {
 public:
  // Called after `bytes` more were copied.
  void keep(uint64_t bytes);

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  uint64_t copied_ = 0;
};

}  // namespace llmdd
