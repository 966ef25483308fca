// The memory of a linked peer, as this process reads it. The destination's process does all
// copying, so this is the only way bytes move between engines.
#pragma once

#include <sys/types.h>

#include <functional>

#include "engine/copier.h"

namespace llmdd {

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Copies the plan's runs; source addresses are the peer's. May be called by several threads at
  // once. `checkpoint` throws to stop the copy, and what it throws passes through: no byte is
  // written after that. Throws Error(kFailed) when the peer's memory cannot be read.
  virtual void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) = 0;
};

// A process of this host, read with process_vm_readv(2).
class ProcessMemory final : public PeerMemory {
 public:
  explicit ProcessMemory(pid_t pid) : pid_(pid) {}

  void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) override {
    copy_from_process(pid_, plan, checkpoint);
  }

 private:
  const pid_t pid_;
};

}  // namespace llmdd
