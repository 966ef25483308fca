// After close_reservation no byte of its blocks changes, however many pushes are under way.
#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr int kRounds = 300;
const std::vector<uint64_t> kReserved = {3, 4, 5, 9};
const std::vector<uint64_t> kPositions = {0, 1, 2, 3};

struct Shared {
  std::atomic<uint64_t> token{0};
  std::atomic<uint64_t> pushed{0};
  std::atomic<uint64_t> refused{0};
};

void push_once(TestEngine& one, int64_t source, Shared& shared) {
  uint64_t token = shared.token;
  if (token == 0) return;
  bool done = attempt({Status::kKvCacheNotExist}, [&] {
    one->push_blocks(push_target(2, 3, token), source, kReserved, kPositions, {});
  });
  ++(done ? shared.pushed : shared.refused);
}

}  // namespace

void closed_reservations_stay_as_they_are() {
  TestEngine one(1);
  TestEngine two(2);
  // Two sources push unlike bytes, so that a copy that comes too late is seen.
  int64_t sources[] = {one.add_blocks(1, 11), one.add_blocks(2, 22)};
  int64_t target = two.add_blocks(3, 0);
  one.link_surely(2, two.port());
  Shared shared;
  Crew crew;
  for (int64_t source : sources) {
    crew.repeat([&, source] { push_once(one, source, shared); });
  }
  for (int round = 0; round < kRounds; ++round) {
    uint64_t token = two->open_reservation(target, kReserved);
    uint64_t before = shared.pushed;
    shared.token = token;
    wait_for([&] { return shared.pushed > before; });
    two->close_reservation(token);
    auto closed = two.memory(target);
    uint64_t refused = shared.refused;
    wait_for([&] { return shared.refused > refused + 1; });
    LLMDD_CHECK(two.memory(target) == closed);
  }
}

}  // namespace llmdd::test
