// The scenarios of the race test. Each returns when all its threads have ended.
#pragma once

#include <cstdint>

#include "race/test_engine.h"

namespace llmdd::test {

// Two engines of one process link, unlink, pull, push and register in both directions at once.
void links_come_and_go();
// Layers are marked, sent, given up and unlinked while other threads pull.
void layers_are_sent_while_links_end();
// A reservation is closed during a push that carries its token: no byte comes after that.
void closed_reservations_stay_as_they_are();
// Collective links of one pair, set up in both directions at once.
void members_meet_in_both_directions();
// Engines are finalized by one thread while all others go on.
void engines_end_during_everything();
// Allocated caches are pulled, deallocated and unbound at once; no memory is left in the pool.
void allocated_caches_are_given_back();
// Memory that both sides have mapped is registered, copied and given up while links come and go.
void shared_memory_comes_and_goes();
// Requests of a link over NIXL run two at a time, or alone.
void queued_requests_keep_their_order();
// The end of a stopped copy is waited for before all that waits for its slots.
void what_comes_next_is_before_all_that_wait();

// The same traffic between two processes, one of which is killed at the end.
void processes_talk(const char* program);
int run_peer_process();

// What each side of a pair does while the other does the same.
class Traffic {
 public:
  Traffic(TestEngine& engine, uint64_t peer, uint16_t peer_port);

  // Adds the threads: pulls, pushes, caches that come and go, layer transfers.
  void join(Crew& crew);
  // Links and unlinks this many times.
  void link_and_unlink(int rounds);

 private:
  void pull();
  void push();
  void register_briefly();
  void send_layers();

  TestEngine& engine_;
  const uint64_t peer_;
  const uint16_t peer_port_;
  const int64_t source_;              // model 1
  const int64_t pulled_;              // model 2
  const int64_t target_;              // model 3, the destination of pushes
  TestEngine::Tensors brief_memory_;  // model 4
};

}  // namespace llmdd::test
