// An engine with memory of its own, and what every scenario does with two of them.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/host_engine.h"

namespace llmdd::test {

constexpr uint64_t kTensors = 4;
constexpr uint64_t kBlocks = 32;
constexpr uint64_t kBlockBytes = 256;

// Codes of a call while links come and go.
constexpr std::initializer_list<Status> kUnlinkedCodes = {Status::kNotYetLink, Status::kFailed};
constexpr std::initializer_list<Status> kVanishingCodes = {Status::kNotYetLink, Status::kFailed,
                                                           Status::kKvCacheNotExist};

struct TestOptions {
  bool remote_access = true;
  uint64_t pool_pages = 0;
};

class TestEngine {
 public:
  using Tensors = std::vector<std::vector<uint8_t>>;

  explicit TestEngine(uint64_t cluster_id, const TestOptions& options = {});

  HostEngine* operator->() { return &engine_; }
  uint64_t cluster_id() const { return cluster_id_; }
  uint16_t port() const { return engine_.listen_port(); }

  // Registers a blocks cache full of `fill`; the memory lives as long as this object. One thread at
  // a time.
  int64_t add_blocks(uint64_t model_id, uint8_t fill);
  Tensors& memory(int64_t cache_id);
  // Whether all of these blocks, of all tensors, are full of `fill`.
  bool holds(int64_t cache_id, const std::vector<uint64_t>& blocks, uint8_t fill);

  Status link(uint64_t cluster_id, uint16_t port);
  void unlink(uint64_t cluster_id, bool force);
  // Links until it works: the peer's own attempts may be under way.
  void link_surely(uint64_t cluster_id, uint16_t port);

 private:
  struct Held {
    int64_t id = 0;
    Tensors tensors;
  };

  const uint64_t cluster_id_;
  std::list<Held> memory_;  // outlives the engine, whose threads write to it
  HostEngine engine_;
};

CacheSpec blocks_spec(TestEngine::Tensors& tensors);
Remote blocks_of(uint64_t cluster_id, uint64_t model_id);
PushTarget push_target(uint64_t cluster_id, uint64_t model_id, uint64_t token = 0);

// All blocks of `dst` from the peer's blocks of this model.
void pull_all(TestEngine& engine, uint64_t peer, uint64_t model_id, int64_t dst);

// Waits for a condition that other threads bring about; the whole program has a deadline.
void wait_for(const std::function<bool()>& condition);

// Threads that repeat their work until the owner stops them; each has then run at least once.
class Crew {
 public:
  ~Crew() { stop(); }
  void repeat(std::function<void()> work);
  void stop();

 private:
  std::atomic<bool> stopped_{false};
  std::vector<std::thread> threads_;
};

}  // namespace llmdd::test
