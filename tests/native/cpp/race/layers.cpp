// Layer-wise transfers whose link, step or patience ends in the middle.
#include "engine/layer_marks.h"
#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr int kRounds = 400;
constexpr uint64_t kLayers = kTensors / 2;

enum class End { kSuccess, kUnlink, kAbort, kReset };

LayerRequest request_of(int64_t source, uint64_t block) {
  LayerRequest request;
  request.src_cache_id = source;
  request.num_layers = kLayers;
  request.src_blocks = {block};
  request.dst_blocks = {block};
  request.targets.push_back({push_target(2, 3), {0, kLayers}, 0, 0});
  return request;
}

void one_round(TestEngine& one, TestEngine& two, int64_t source, int64_t target, int round) {
  auto end = static_cast<End>(round % 4);
  uint64_t block = static_cast<uint64_t>(round) % kBlocks;
  auto fill = static_cast<uint8_t>(round + 1);
  for (auto& tensor : one.memory(source)) std::fill(tensor.begin(), tensor.end(), fill);
  LayerMarks marks(kLayers);
  auto task = one->transfer(request_of(source, block), std::make_shared<MarksGate>(marks.step()));
  std::thread marker([&] {
    marks.mark(0);
    if (end == End::kAbort) marks.abort();
    if (end == End::kReset) marks.reset();
    marks.mark_all();
  });
  if (end == End::kUnlink) two.unlink(1, round % 8 < 4);
  LLMDD_CHECK(task->wait(std::nullopt));
  marker.join();
  std::optional<Status> result = task->results()[0];
  if (result == Status::kSuccess) LLMDD_CHECK(two.holds(target, {block}, fill));
  if (end == End::kSuccess) LLMDD_CHECK(result == Status::kSuccess);
  if (end == End::kUnlink) {
    one.unlink(2, true);
    one.link_surely(2, two.port());
  }
}

}  // namespace

void layers_are_sent_while_links_end() {
  TestEngine one(1);
  TestEngine two(2);
  int64_t source = one.add_blocks(1, 0);
  int64_t pulled = two.add_blocks(2, 0);
  int64_t target = two.add_blocks(3, 0);
  one.link_surely(2, two.port());
  Crew crew;
  crew.repeat([&] { attempt(kUnlinkedCodes, [&] { pull_all(two, 1, 1, pulled); }); });
  for (int round = 0; round < kRounds; ++round) one_round(one, two, source, target, round);
}

}  // namespace llmdd::test
