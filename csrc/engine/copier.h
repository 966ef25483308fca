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
  // The destination was found to be mapped and writable, so that this process can write it by
  // itself; else only the kernel may, which answers instead of sending a signal.
  bool dst_mapped = false;
};

// `checkpoint` is called before each kernel call (at most 1,024 pieces and 32 MiB) and throws to
// stop the copy. Throws Error(kFailed) when the kernel refuses.
void copy_from_process(pid_t source, const CopyPlan& plan, const std::function<void()>& checkpoint);

}  // namespace llmdd
