// Copies from another process of this host into this one with process_vm_readv(2).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "model/block_runs.h"

namespace llmdd {

// Every run is copied from src_bases[i] to dst_bases[i], for each i in turn.
struct CopyPlan {
  std::vector<uint64_t> src_bases;
  std::vector<uint64_t> dst_bases;
  std::vector<ByteRun> runs;
};

// `checkpoint` is called before each kernel call (at most 1,024 pieces and 32 MiB) and throws to
// stop the copy. Throws Error(kFailed) when the kernel refuses.
void copy_from_process(pid_t source, const CopyPlan& plan, const std::function<void()>& checkpoint);

// Lets every copy of this process take as long as over a link of this rate; 0: as fast as it goes.
// For tests and benches of what happens meanwhile.
void set_copy_rate(uint64_t bytes_per_second);

// Holds one copy to that rate.
class CopyPace {
 public:
  // These bytes have been copied, too. Sleeps for as long as that was too fast.
  void add(uint64_t bytes);

 private:
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  uint64_t copied_ = 0;
};

}  // namespace llmdd
