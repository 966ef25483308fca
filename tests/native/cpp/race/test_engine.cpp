#include "race/test_engine.h"

#include <algorithm>
#include <numeric>

namespace llmdd::test {
namespace {

// Far longer than anything here takes, so that only a lost wake-up runs into it.
constexpr int64_t kLongMs = 60'000;
constexpr uint32_t kPageShift = 12;

EngineOptions engine_options(uint64_t cluster_id, const TestOptions& wanted) {
  EngineOptions options;
  options.cluster_id = cluster_id;
  options.remote_access = wanted.remote_access;
  options.sync_kv_timeout_ms = kLongMs;
  options.listen_ip = "127.0.0.1";
  if (wanted.pool_pages > 0) {
    options.device_pool = PoolConfig{wanted.pool_pages << kPageShift, kPageShift};
  }
  return options;
}

std::vector<uint64_t> all_blocks() {
  std::vector<uint64_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  return blocks;
}

}  // namespace

TestEngine::TestEngine(uint64_t cluster_id, const TestOptions& options)
    : cluster_id_(cluster_id), engine_(engine_options(cluster_id, options)) {}

int64_t TestEngine::add_blocks(uint64_t model_id, uint8_t fill) {
  Held& held = memory_.emplace_back();
  held.tensors.assign(kTensors, std::vector<uint8_t>(kBlocks * kBlockBytes, fill));
  held.id = engine_.register_blocks_cache(blocks_spec(held.tensors), model_id);
  return held.id;
}

TestEngine::Tensors& TestEngine::memory(int64_t cache_id) {
  auto found = std::find_if(memory_.begin(), memory_.end(),
                            [cache_id](const Held& held) { return held.id == cache_id; });
  LLMDD_CHECK(found != memory_.end());
  return found->tensors;
}

bool TestEngine::holds(int64_t cache_id, const std::vector<uint64_t>& blocks, uint8_t fill) {
  for (const auto& tensor : memory(cache_id)) {
    for (uint64_t block : blocks) {
      auto first = tensor.begin() + static_cast<ptrdiff_t>(block * kBlockBytes);
      auto full = [fill](uint8_t byte) { return byte == fill; };
      if (!std::all_of(first, first + kBlockBytes, full)) return false;
    }
  }
  return true;
}

Status TestEngine::link(uint64_t cluster_id, uint16_t port) {
  return engine_.link({{cluster_id, "127.0.0.1", port}}, kLongMs)[0];
}

void TestEngine::unlink(uint64_t cluster_id, bool force) {
  engine_.unlink({cluster_id}, kLongMs, force);
}

void TestEngine::link_surely(uint64_t cluster_id, uint16_t port) {
  wait_for([&] {
    Status status = link(cluster_id, port);
    return status == Status::kSuccess || status == Status::kAlreadyLink;
  });
}

CacheSpec blocks_spec(TestEngine::Tensors& tensors) {
  CacheSpec spec;
  spec.shape = {kBlocks, kBlockBytes};
  spec.element_bytes = 1;
  spec.is_blocks = true;
  spec.remote_accessible = true;
  for (auto& tensor : tensors) {
    spec.tensor_addrs.push_back(reinterpret_cast<uint64_t>(tensor.data()));
  }
  return spec;
}

Remote blocks_of(uint64_t cluster_id, uint64_t model_id) {
  return {cluster_id, {KeyKind::kBlocks, 0, model_id, 0}};
}

PushTarget push_target(uint64_t cluster_id, uint64_t model_id, uint64_t token) {
  return {cluster_id, {KeyKind::kBlocks, 0, model_id, 0}, token, {}};
}

void pull_all(TestEngine& engine, uint64_t peer, uint64_t model_id, int64_t dst) {
  engine->pull_blocks(blocks_of(peer, model_id), dst, all_blocks(), all_blocks(), {});
}

void wait_for(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Crew::repeat(std::function<void()> work) {
  threads_.emplace_back([this, work = std::move(work)] {
    do work();
    while (!stopped_);
  });
}

void Crew::stop() {
  stopped_ = true;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace llmdd::test
