// Collective links of one pair, in which sometimes the one and sometimes the other side dials.
#include <unistd.h>

#include <string>

#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr int kComms = 20;
constexpr int kRounds = 10;

CommSpec spec_of(int round, int number) {
  CommSpec spec;
  spec.name = "race " + std::to_string(::getpid()) + " " + std::to_string(round) + " " +
              std::to_string(number);
  spec.members = number % 2 == 0 ? std::vector<std::pair<uint64_t, uint32_t>>{{1, 0}, {2, 1}}
                                 : std::vector<std::pair<uint64_t, uint32_t>>{{2, 0}, {1, 1}};
  return spec;
}

std::vector<int64_t> start_all(TestEngine& engine, int round, bool backwards) {
  std::vector<int64_t> ids;
  for (int i = 0; i < kComms; ++i) {
    ids.push_back(engine->link_members(spec_of(round, backwards ? kComms - 1 - i : i)));
  }
  return ids;
}

void await_all(TestEngine& engine, const std::vector<int64_t>& ids) {
  for (int64_t id : ids) {
    wait_for([&] { return engine->comm_state(id) != CommState::kPreparing; });
    LLMDD_CHECK(engine->comm_state(id) == CommState::kOk);
  }
}

void end_all(TestEngine& engine, const std::vector<int64_t>& ids) {
  for (int64_t id : ids) engine->unlink_members(id);
}

// Runs the same for both engines at once.
template <typename Work>
void together(Work work, TestEngine& one, TestEngine& two) {
  std::thread other([&] { work(two); });
  work(one);
  other.join();
}

}  // namespace

void members_meet_in_both_directions() {
  TestEngine one(1);
  TestEngine two(2);
  one.add_blocks(1, 1);
  two.add_blocks(1, 2);
  int64_t pulled = one.add_blocks(2, 0);
  for (int round = 0; round < kRounds; ++round) {
    std::vector<int64_t> ids[3];
    together(
        [&](TestEngine& engine) {
          auto& own = ids[engine.cluster_id()];
          own = start_all(engine, round, engine.cluster_id() == 2);
          await_all(engine, own);
        },
        one, two);
    pull_all(one, 2, 1, pulled);
    LLMDD_CHECK(one.holds(pulled, {0, kBlocks - 1}, 2));
    together([&](TestEngine& engine) { end_all(engine, ids[engine.cluster_id()]); }, one, two);
    LLMDD_CHECK(!one->linked(2));
  }
}

}  // namespace llmdd::test
