// The memory of a peer that is reached through NIXL, on another host or on this one.
//
// destination                               source
//   copy(): takes a staging slot
//   Fetch(slot, pieces)  ------link------>   FetchServer: checks that the pieces are registered
//                                            memory, gathers them in a slot of its own
//   the slot fills       <-----NIXL-------   writes that slot
//                        <-----link-------   Fetched, once all bytes are there
//   asks `checkpoint` and scatters the slot into the cache
//
// So the peer writes into this link's staging memory and nowhere else, and a slot is used again
// only when its transfer is known to have ended. Several fetches are on their way at once. The
// source writes rather than the destination reads because over TCP that is two to three times as
// fast, and needs no memory but the slots to be known to NIXL.
//
// All requests of the peer except Fetch wait their turn on other threads than the link's own, which
// is free for the replies that a copy waits for. Two pushes may run at once.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "common/socket_io.h"
#include "engine/fetch_server.h"
#include "engine/messages.h"
#include "engine/nixl_agent.h"
#include "engine/peer_memory.h"
#include "engine/request_queue.h"
#include "engine/staging_slab.h"

namespace llmdd {

// More pushes at once would not keep the network any busier.
constexpr size_t kRequestThreads = 2;

class NixlMemory final : public PeerMemory {
 public:
  NixlMemory(std::shared_ptr<const NixlLibrary> nixl, size_t num_slots);
  ~NixlMemory() override;

  // What the peer's `connect` needs.
  Stage stage(const Nonce& token);
  // Throws Error(kLinkFailed).
  void connect(const Stage& peer);
  // Writes a few bytes to the peer, which has to make progress meanwhile, and makes progress for
  // the peer until it is done with its own, too. Throws Error(kLinkFailed) with a sentence.
  void probe(const WaitLimit& limit, const std::function<bool()>& peer_done);
  void progress_until(const std::function<bool()>& condition, const WaitLimit& limit);

  void copy(const CopyPlan& plan, const std::function<void()>& checkpoint) override;
  void attach(Link& link, RequestHandler& handler) override;
  bool take(const Frame& request) override;
  void end() override;

 private:
  class Fetches;
  struct Fetching;
  struct Abandoned;
  enum class Left { kNothing, kSome, kTooLate };

  void answer(const Frame& request);
  std::optional<size_t> free_slot();
  // Gives back the slots of stopped copies whose bytes have ended; says what is left.
  Left reclaim();
  void drain();
  bool is_answered(const Fetching& fetch);

  StagingSlab slab_;
  std::unique_ptr<FetchServer> server_;
  NixlAgent agent_;  // ends before the memory that it has registered, the server's too
  SlabFacts peer_slab_;
  Link* link_ = nullptr;
  RequestHandler* handler_ = nullptr;
  std::mutex abandoned_mutex_;
  std::list<Abandoned> abandoned_;
  RequestQueue requests_{kRequestThreads};
};

}  // namespace llmdd
