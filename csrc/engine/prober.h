// Finds out whether this process may read the memory of a peer, and says what to do when it may
// not.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "common/random.h"

namespace llmdd {

// One sentence for the errno of a refused process_vm_readv: what failed and the next step.
std::string probe_sentence(pid_t pid, int error);

class Prober {
 public:
  // Reads `expected` at `nonce_addr` of the peer. Throws Error(kLinkFailed) with a sentence.
  void probe(pid_t pid, uint64_t nonce_addr, const Nonce& expected) const;

  // Tests only: the next probes fail with this errno, 0 ends that. Yama and PID namespaces are not
  // at hand where the tests run.
  void inject_errno(int error) { injected_ = error; }

 private:
  std::atomic<int> injected_{0};
};

// Lets processes of the same user read this one's memory where Yama would not (PR_SET_PTRACER_ANY);
// without Yama it has no effect.
void allow_readers();
void forbid_readers();

}  // namespace llmdd
