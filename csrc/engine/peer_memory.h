// The memory of a linked peer, as this process reads it. Only the destination's process writes to
// its caches, so this is the only way bytes move between engines.
#pragma once

#include <sys/types.h>

#include <functional>

#include "common/unique_fd.h"
#include "engine/copier.h"
#include "engine/wire.h"

namespace llmdd {

class Link;
class RequestHandler;

class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Copies the plan's runs; source addresses are the peer's. May be called by several threads at
  // once. `checkpoint` throws to stop the copy, and what it throws passes through: no byte is
  // written after that. Throws Error(kFailed) when the peer's memory cannot be read.
  virtual void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) = 0;

  // A Share, with its descriptor, or a Withdraw. In force for copies that begin later. Throws
  // WireError for what no honest peer sends. May not log: the link holds a mutex.
  virtual void notice(const Frame& /*frame*/, UniqueFd /*fd*/) {
    throw WireError("the peer offers shared memory that was not asked for");
  }

  // The link has ended. Lets go of what is held of the peer, as soon as no copy uses it; later
  // notices have no effect.
  virtual void let_go() {}

  // For memory that is read by messages on the link. The link and its handler live longer.
  virtual void attach(Link& /*link*/, RequestHandler& /*handler*/) {}
  // Takes a request of the peer to serve it on another thread than the link's; false: does not.
  virtual bool take(const Frame& /*request*/) { return false; }
  // The link has ended. Returns when no thread of this object uses it any more.
  virtual void end() {}
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
