// A process of this host whose shared memory this process has mapped: copies from the mapping, and
// by cross-memory attach what is not in it.
#pragma once

#include <sys/types.h>

#include "engine/copy_threads.h"
#include "engine/peer_memory.h"
#include "shm/peer_pages.h"

namespace llmdd {

class SharedPeerMemory final : public PeerMemory {
 public:
  // `threads` outlives this; null: copies on the calling thread only.
  SharedPeerMemory(pid_t pid, CopyThreads* threads) : pid_(pid), threads_(threads) {}

  void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) override;
  void notice(const Frame& frame, UniqueFd fd) override;
  void let_go() override { pages_.end(); }

 private:
  const pid_t pid_;
  CopyThreads* const threads_;
  PeerPages pages_;
};

}  // namespace llmdd
