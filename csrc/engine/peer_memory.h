// The memory of a linked peer, as this process reads it. The destination's process does all
// copying, so this is the only way bytes move between engines.
#pragma once

#include <sys/types.h>

#include <functional>

#include "common/unique_fd.h"
#include "engine/copier.h"
#include "engine/wire.h"

namespace llmdd {

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Copies the plan's runs; source addresses are the peer's. May be called by several threads at
  // once. `checkpoint` throws to stop the copy, and what it throws passes through: no byte is
  // written after that. Throws Error(kFailed) when the peer's memory cannot be read.
  virtual void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) = 0;

  // A Share, with its descriptor, or a Withdraw. In force for copies that begin later. Throws
  // WireError for what no honest peer sends. May not log: the link holds a mutex.
  virtual void notice(const Frame& frame, UniqueFd fd) = 0;

  // The link has ended. Lets go of what is held of the peer, as soon as no copy uses it; later
  // notices have no effect.
  virtual void let_go() = 0;
};

// A process of this host, read with process_vm_readv(2).
class ProcessMemory final : public PeerMemory {
 public:
  explicit ProcessMemory(pid_t pid) : pid_(pid) {}

  void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) override {
    copy_from_process(pid_, plan, checkpoint);
  }

  void notice(const Frame&, UniqueFd) override {
    throw WireError("the peer offers shared memory that was not asked for");
  }

  void let_go() override {}

 private:
  const pid_t pid_;
};

}  // namespace llmdd
