// One layer-wise transfer: a thread that waits for each needed layer of a local cache, in ascending
// order, and pushes it to every destination that wants it.
//
//   layer WAITING --gate--> COMPUTED --push, each destination in order--> DONE
//   The gate's refusal, and a destination's first failure, end the whole task.
//
// If the gate allows it, a few pushes are under way at once. They are still judged in order, and a
// task that has ended has none left; after a failure, some of them may have arrived unreported.
//
// The thread touches the engine only while it pushes, and `cancel` waits for that alone: a gate
// that never answers cannot keep an engine from being destroyed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/layer_gate.h"
#include "engine/push_source.h"
#include "engine/transfers.h"

namespace llmdd {

struct LayerTarget {
  PushTarget target;  // `addrs`: tensors_per_layer addresses for each layer of `src_layers`
  LayerRange src_layers;
  uint64_t first_dst_layer = 0;  // where the first layer of `src_layers` goes; not with addresses
  uint64_t src_batch_index = 0;
};

struct LayerRequest {
  int64_t src_cache_id = 0;
  uint64_t num_layers = 0;
  uint32_t tensors_per_layer = 2;
  std::vector<uint64_t> src_blocks;  // empty: the row `src_batch_index`
  std::vector<uint64_t> dst_blocks;  // empty: to a row
  uint64_t dst_block_bytes = 0;      // 0: not given
  std::vector<LayerTarget> targets;
};

// Of one layer's push to one target that has arrived; nanoseconds of CLOCK_MONOTONIC.
struct LayerTime {
  size_t target = 0;
  uint64_t layer = 0;
  int64_t started_ns = 0;
  int64_t acknowledged_ns = 0;
};

class LayerTask : public std::enable_shared_from_this<LayerTask> {
 public:
  LayerTask(Transfers& transfers, LayerRequest request, std::shared_ptr<LayerGate> gate);

  void start();  // throws Error(kFailed) when no thread can be had
  // Stops the task; what is not decided stays so. Does not wait.
  void cancel();
  // After `cancel`: returns when the engine is not used any more. Waits a few seconds for the
  // thread, then leaves it to a gate that does not answer.
  void join_cancelled();
  // After `done`.
  void join();

  bool done() const;
  // False at the deadline; no timeout waits for ever.
  bool wait(const std::optional<int64_t>& timeout_ms) const;
  // One per target, in order; empty for one that was never decided.
  std::vector<std::optional<Status>> results() const;
  // What has arrived so far, in the order in which it was sent.
  std::vector<LayerTime> layer_times() const;
  // False in a forked child, where the thread does not exist.
  bool own_process() const;

 private:
  class Sending;  // the thread uses the engine
  struct UnderWay {
    size_t index = 0;
    uint64_t layer = 0;
    int64_t started_ns = 0;
    Transfers::Pushing pushing;
  };

  void run();
  bool run_layer(uint64_t layer);
  bool wait_for(uint64_t layer);
  bool push_to(size_t index, uint64_t layer);
  UnderWay start_push(size_t index, uint64_t layer);
  // Waits until at most `left` pushes are under way. False when one has ended the task.
  bool finish_down_to(size_t left);
  bool finish_oldest();
  void finish(const UnderWay& push);
  // Records a failure; false when it ends the task.
  bool goes_on_after(size_t index, uint64_t layer, const Error& error);
  void await(const UnderWay& push);
  void await_the_rest();
  size_t most_under_way() const;
  bool find_wanting(uint64_t layer);
  const PushSource& source_of(size_t index, const CacheLayout& layout);
  void decide(size_t index, Status status);

  Transfers& transfers_;
  const LayerRequest request_;
  const pid_t owner_pid_;
  std::vector<std::optional<PushSource>> sources_;  // task thread only
  std::deque<UnderWay> under_way_;                  // task thread only
  std::vector<size_t> wanting_;  // targets that want the current layer; task thread only
  std::thread thread_;
  std::atomic<bool> cancelled_{false};

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::shared_ptr<LayerGate> gate_;  // given back when the thread needs it no more
  std::vector<std::optional<Status>> results_;
  std::vector<LayerTime> layer_times_;
  bool sending_ = false;
  bool done_ = false;
};

// The tasks whose threads may still run.
class LayerTasks {
 public:
  // Joins what has ended, so that finished tasks leave no thread behind.
  void start(std::shared_ptr<LayerTask> task);
  void cancel_all();
  void join_all();

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<LayerTask>> tasks_;
};

}  // namespace llmdd
