// Links that come and go under traffic, inside one process.
#include "engine/layer_marks.h"
#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr int kRounds = 200;

}  // namespace

Traffic::Traffic(TestEngine& engine, uint64_t peer, uint16_t peer_port)
    : engine_(engine),
      peer_(peer),
      peer_port_(peer_port),
      source_(engine.add_blocks(1, static_cast<uint8_t>(engine.cluster_id()))),
      pulled_(engine.add_blocks(2, 0)),
      target_(engine.add_blocks(3, 0)),
      brief_memory_(kTensors, std::vector<uint8_t>(kBlocks * kBlockBytes)) {}

void Traffic::pull() {
  attempt(kVanishingCodes, [this] { pull_all(engine_, peer_, 1, pulled_); });
  attempt(kVanishingCodes, [this] { pull_all(engine_, peer_, 4, pulled_); });
}

void Traffic::push() {
  attempt(kVanishingCodes,
          [this] { engine_->push_blocks(push_target(peer_, 3), source_, {0, 5}, {1, 2}, {}); });
  attempt(kVanishingCodes, [this] { engine_->check_link(peer_); });
}

void Traffic::register_briefly() {
  attempt({Status::kFailed}, [this] {
    int64_t id = engine_->register_blocks_cache(blocks_spec(brief_memory_), 4);
    attempt(kVanishingCodes, [this, id] { pull_all(engine_, peer_, 1, id); });
    engine_->unregister_cache(id);
  });
}

void Traffic::send_layers() {
  LayerMarks marks(2);
  LayerRequest request;
  request.src_cache_id = source_;
  request.num_layers = 2;
  request.src_blocks = {3, 4, 9};
  request.dst_blocks = {8, 9, 3};
  request.targets.push_back({push_target(peer_, 3), {0, 2}, 0, 0});
  attempt({Status::kFailed}, [&] {
    auto task = engine_->transfer(request, std::make_shared<MarksGate>(marks.step()));
    marks.mark(0);
    marks.mark(1);
    LLMDD_CHECK(task->wait(std::nullopt));
  });
}

void Traffic::join(Crew& crew) {
  crew.repeat([this] { pull(); });
  crew.repeat([this] { push(); });
  crew.repeat([this] { register_briefly(); });
  crew.repeat([this] { send_layers(); });
}

void Traffic::link_and_unlink(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    engine_.link(peer_, peer_port_);
    engine_.unlink(peer_, round % 3 == 0);
    engine_->last_link_error(peer_);
  }
}

void links_come_and_go() {
  TestEngine one(1);
  TestEngine two(2);
  Traffic from_one(one, 2, two.port());
  Traffic from_two(two, 1, one.port());
  {
    Crew crew;
    from_one.join(crew);
    from_two.join(crew);
    std::thread other([&] { from_two.link_and_unlink(kRounds); });
    from_one.link_and_unlink(kRounds);
    other.join();
  }
  one.unlink(2, true);
  two.unlink(1, true);
  one.link_surely(2, two.port());
  int64_t fresh = one.add_blocks(7, 0);
  pull_all(one, 2, 1, fresh);
  LLMDD_CHECK(one.holds(fresh, {0, kBlocks - 1}, 2));
}

}  // namespace llmdd::test
