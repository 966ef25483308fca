// One NIXL agent, which serves one link: it knows one peer, and nothing of that peer can reach
// memory after the agent is gone.
//
// NIXL's progress thread is off, so bytes move only inside these calls: the side that is written to
// has to call `progress` as well. Every method may be called by any thread.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "engine/nixl_library.h"
#include "engine/wire.h"

namespace llmdd {

class NixlAgent {
 public:
  // A write on its way. It does not outlive its agent.
  class Write {
   public:
    Write(NixlAgent& agent, NixlLibrary::Handle request) : agent_(agent), request_(request) {}
    Write(const Write&) = delete;
    Write& operator=(const Write&) = delete;
    // One that does not end within a moment is given up; bytes of it may still arrive at the peer.
    ~Write();

    // Moves what can be moved now. True once all bytes are in the peer's memory. Throws
    // Error(kFailed).
    bool done();

   private:
    friend class NixlAgent;
    NixlAgent& agent_;
    const NixlLibrary::Handle request_;
    int status_ = NixlLibrary::kInProgress;
  };

  // Takes 15 ms, the first in a process 400. Throws Error(kFailed).
  explicit NixlAgent(std::shared_ptr<const NixlLibrary> nixl);
  NixlAgent(const NixlAgent&) = delete;
  NixlAgent& operator=(const NixlAgent&) = delete;
  ~NixlAgent();

  // For as long as the agent lives; the memory must live longer.
  void register_memory(void* addr, size_t size);
  // What the peer's `connect` needs, with all memory registered so far.
  Bytes metadata();
  // Once, before the first write. Throws Error(kLinkFailed) for what is no agent's metadata.
  void connect(const Bytes& metadata);

  // Both ranges must be registered, the remote one by the peer. Throws Error(kFailed), or the
  // write's `done` does.
  std::unique_ptr<Write> write(const void* local, uint64_t remote, size_t size);
  // Takes in what the peer writes.
  void progress();

 private:
  void create_backend();

  const std::shared_ptr<const NixlLibrary> nixl_;
  std::mutex mutex_;
  NixlLibrary::Handle agent_ = nullptr;
  NixlLibrary::Handle backend_ = nullptr;
  NixlLibrary::Handle notifications_ = nullptr;
  std::string peer_;
};

}  // namespace llmdd
