// Jobs of a request queue: which run at once, and what `end` leaves.
#include <atomic>

#include "engine/request_queue.h"
#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr size_t kRounds = 2000;
constexpr size_t kThreads = 2;
using Order = RequestQueue::Order;

struct Seen {
  std::atomic<int> beside{0};
  std::atomic<int> alone{0};
  std::atomic<size_t> done{0};
};

// Neither of the two ends before the other has begun.
void post_two_that_meet(RequestQueue& queue, Seen& seen) {
  auto begun = std::make_shared<std::atomic<size_t>>(0);
  for (size_t i = 0; i < kThreads; ++i) {
    queue.post(
        [begun, &seen] {
          ++*begun;
          wait_for([&] { return *begun == kThreads; });
          ++seen.done;
        },
        Order::kBesideOthers);
  }
}

void post_some(RequestQueue& queue, Seen& seen) {
  queue.post(
      [&seen] {
        ++seen.beside;
        LLMDD_CHECK(seen.alone == 0);
        --seen.beside;
        ++seen.done;
      },
      Order::kBesideOthers);
  queue.post(
      [&seen] {
        LLMDD_CHECK(++seen.alone == 1);
        LLMDD_CHECK(seen.beside == 0);
        --seen.alone;
        ++seen.done;
      },
      Order::kAlone);
}

}  // namespace

void queued_requests_keep_their_order() {
  Seen seen;
  RequestQueue queue(kThreads);
  for (size_t round = 0; round < kRounds; ++round) {
    post_some(queue, seen);
    post_two_that_meet(queue, seen);
  }
  wait_for([&] { return seen.done == (2 + kThreads) * kRounds; });
  post_some(queue, seen);
  queue.end();
  size_t done = seen.done;
  post_some(queue, seen);
  LLMDD_CHECK(seen.done == done);
}

void what_comes_next_is_before_all_that_wait() {
  std::atomic<bool> open{false};
  std::atomic<bool> next_done{false};
  std::atomic<bool> last_done{false};
  RequestQueue queue(1);
  queue.post([&] { wait_for([&] { return open.load(); }); }, Order::kBesideOthers);
  queue.post(
      [&] {
        LLMDD_CHECK(next_done);
        last_done = true;
      },
      Order::kBesideOthers);
  queue.post([&] { next_done = true; }, Order::kNext);
  open = true;
  wait_for([&] { return last_done.load(); });
}

}  // namespace llmdd::test
