#include "engine/layer_task.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "common/clock.h"
#include "common/log.h"
#include "common/start_thread.h"

namespace llmdd {
namespace {

constexpr std::chrono::seconds kGateGrace{5};
constexpr size_t kMostUnderWay = 8;
constexpr size_t kFewRuns = 10'000;

std::string identity(const LayerTarget& target, uint64_t layer) {
  return "cluster " + std::to_string(target.target.cluster_id) + ": layer " +
         std::to_string(layer) + ": ";
}

// Its reservation was closed, or its cache unregistered: no other destination minds.
bool is_withdrawn(const LayerTarget& target, Status status) {
  return target.target.token != 0 && status == Status::kKvCacheNotExist;
}

}  // namespace

class LayerTask::Sending {
 public:
  explicit Sending(LayerTask& task) : task_(task) {
    std::lock_guard lock(task_.mutex_);
    if (task_.cancelled_) throw Error(Status::kFailed, "the engine was finalized");
    task_.sending_ = true;
  }
  Sending(const Sending&) = delete;
  Sending& operator=(const Sending&) = delete;
  ~Sending() {
    std::lock_guard lock(task_.mutex_);
    task_.sending_ = false;
    task_.changed_.notify_all();
  }

 private:
  LayerTask& task_;
};

LayerTask::LayerTask(Transfers& transfers, LayerRequest request, std::shared_ptr<LayerGate> gate)
    : transfers_(transfers),
      request_(std::move(request)),
      owner_pid_(::getpid()),
      sources_(request_.targets.size()),
      gate_(std::move(gate)),
      results_(request_.targets.size()) {}

void LayerTask::start() {
  thread_ =
      start_thread("the transfer's", Status::kFailed, [self = shared_from_this()] { self->run(); });
}

bool LayerTask::own_process() const { return ::getpid() == owner_pid_; }

void LayerTask::run() {
  std::shared_ptr<LayerGate> gate;
  {
    std::lock_guard lock(mutex_);
    gate = gate_;
  }
  bool going = true;
  for (uint64_t layer = 0; going && layer < request_.num_layers; ++layer) going = run_layer(layer);
  if (!going || !finish_down_to(0)) await_the_rest();
  gate->finish();
  gate.reset();
  std::shared_ptr<LayerGate> last;  // destroyed outside the lock: that may run Python code
  {
    std::lock_guard lock(mutex_);
    last.swap(gate_);
  }
  last.reset();
  std::lock_guard lock(mutex_);
  done_ = true;
  changed_.notify_all();
}

bool LayerTask::find_wanting(uint64_t layer) {
  wanting_.clear();
  for (size_t i = 0; i < request_.targets.size(); ++i) {
    const LayerRange& layers = request_.targets[i].src_layers;
    bool withdrawn = results_[i].has_value();  // only this thread writes them
    if (layer >= layers.start && layer < layers.stop && !withdrawn) wanting_.push_back(i);
  }
  return !wanting_.empty();
}

bool LayerTask::run_layer(uint64_t layer) {
  if (!find_wanting(layer)) return true;
  if (!gate_->is_open(layer)) {
    if (!finish_down_to(0)) return false;
    if (!find_wanting(layer)) return true;  // a destination was withdrawn
  }
  if (!wait_for(layer)) return false;
  return std::all_of(wanting_.begin(), wanting_.end(),
                     [this, layer](size_t index) { return push_to(index, layer); });
}

bool LayerTask::wait_for(uint64_t layer) {
  Status status = Status::kParamInvalid;
  try {
    if (gate_->wait(layer, cancelled_)) return true;
    if (cancelled_) status = Status::kFailed;
  } catch (const Error& error) {  // logged by the gate
    status = error.status();
  }
  if (!finish_down_to(0)) return false;
  for (size_t index : wanting_) {
    if (!results_[index]) decide(index, status);
  }
  return false;
}

bool LayerTask::push_to(size_t index, uint64_t layer) {
  if (!finish_down_to(most_under_way() - 1)) return false;
  if (results_[index]) return true;  // withdrawn meanwhile
  try {
    under_way_.push_back(start_push(index, layer));
    return true;
  } catch (const Error& error) {
    return finish_down_to(0) && goes_on_after(index, layer, error);
  }
}

bool LayerTask::finish_down_to(size_t left) {
  while (under_way_.size() > left) {
    if (!finish_oldest()) return false;
  }
  return true;
}

bool LayerTask::finish_oldest() {
  UnderWay oldest = std::move(under_way_.front());
  under_way_.pop_front();
  if (results_[oldest.index]) {  // withdrawn: whatever the answer is
    await(oldest);
    return true;
  }
  try {
    finish(oldest);
  } catch (const Error& error) {
    return goes_on_after(oldest.index, oldest.layer, error);
  }
  bool last = oldest.layer + 1 == request_.targets[oldest.index].src_layers.stop;
  if (last) decide(oldest.index, Status::kSuccess);
  return true;
}

void LayerTask::finish(const UnderWay& push) {
  Sending sending(*this);
  // Somebody waits for the last layer's arrival, and nothing is left to do meanwhile.
  bool is_last = push.layer + 1 == request_.num_layers && under_way_.empty();
  transfers_.finish_push(push.pushing, is_last);
  int64_t now_ns = monotonic_ns();
  std::lock_guard lock(mutex_);
  layer_times_.push_back({push.index, push.layer, push.started_ns, now_ns});
}

void LayerTask::await(const UnderWay& push) {
  try {
    finish(push);
  } catch (const Error&) {
    // The task, or this destination, has ended with an earlier failure.
  }
}

void LayerTask::await_the_rest() {
  for (const UnderWay& push : under_way_) await(push);
  under_way_.clear();
}

bool LayerTask::goes_on_after(size_t index, uint64_t layer, const Error& error) {
  const LayerTarget& target = request_.targets[index];
  bool withdrawn = is_withdrawn(target, error.status());
  decide(index, error.status());
  log(withdrawn ? LogLevel::kDebug : LogLevel::kError, identity(target, layer) + error.what());
  return withdrawn;
}

// Long lists of runs would fill the link's buffer of outgoing messages.
size_t LayerTask::most_under_way() const {
  return gate_->allows_overlap() && request_.dst_blocks.size() <= kFewRuns ? kMostUnderWay : 1;
}

LayerTask::UnderWay LayerTask::start_push(size_t index, uint64_t layer) {
  Sending sending(*this);
  const LayerTarget& target = request_.targets[index];
  uint32_t per_layer = request_.tensors_per_layer;
  uint64_t nth = layer - target.src_layers.start;
  PushTarget to = target.target;
  if (!to.addrs.empty()) {
    auto first = target.target.addrs.begin() + static_cast<ptrdiff_t>(nth * per_layer);
    to.addrs.assign(first, first + per_layer);
  }
  uint64_t dst_layer = target.first_dst_layer + nth;
  Layers layers{LayerRange{layer, layer + 1}, LayerRange{dst_layer, dst_layer + 1}, per_layer};
  std::shared_ptr<Cache> cache = transfers_.source(to, request_.src_cache_id);
  const PushSource& source = source_of(index, cache->layout);
  int64_t now_ns = monotonic_ns();
  return {index, layer, now_ns, transfers_.start_push(to, std::move(cache), layers, source)};
}

const PushSource& LayerTask::source_of(size_t index, const CacheLayout& layout) {
  std::optional<PushSource>& source = sources_[index];
  if (source) return *source;
  uint64_t row = request_.targets[index].src_batch_index;
  uint64_t block_bytes = request_.dst_block_bytes;
  if (!request_.src_blocks.empty()) {
    if (block_bytes != 0 && block_bytes != layout.stride) {
      throw Error(Status::kParamInvalid, "dst_block_memory_size " + std::to_string(block_bytes) +
                                             " is not the source's block size of " +
                                             std::to_string(layout.stride));
    }
    source = blocks_source(layout, request_.src_blocks, request_.dst_blocks);
  } else if (!request_.dst_blocks.empty()) {
    source = chunks_source(layout, row, block_bytes, request_.dst_blocks);
  } else {
    source = row_source(layout, row);
  }
  return *source;
}

void LayerTask::decide(size_t index, Status status) {
  std::lock_guard lock(mutex_);
  results_[index] = status;
}

void LayerTask::cancel() {
  std::shared_ptr<LayerGate> gate;
  {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
    gate = gate_;
  }
  if (gate) gate->wake();
}

void LayerTask::join_cancelled() {
  bool ended = false;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !sending_; });
    ended = changed_.wait_for(lock, kGateGrace, [this] { return done_; });
  }
  if (ended) return join();
  thread_.detach();
  log(LogLevel::kWarning,
      "a layer synchronizer has not returned; its transfer ends when it does, without a copy");
}

void LayerTask::join() {
  if (thread_.joinable()) thread_.join();
}

bool LayerTask::done() const {
  std::lock_guard lock(mutex_);
  return done_;
}

bool LayerTask::wait(const std::optional<int64_t>& timeout_ms) const {
  std::unique_lock lock(mutex_);
  auto ended = [this] { return done_; };
  if (timeout_ms) {
    return changed_.wait_until(lock, Deadline::after_ms(*timeout_ms).time(), ended);
  }
  changed_.wait(lock, ended);
  return true;
}

std::vector<std::optional<Status>> LayerTask::results() const {
  std::lock_guard lock(mutex_);
  return results_;
}

std::vector<LayerTime> LayerTask::layer_times() const {
  std::lock_guard lock(mutex_);
  return layer_times_;
}

void LayerTasks::start(std::shared_ptr<LayerTask> task) {
  std::lock_guard lock(mutex_);
  auto ended = std::stable_partition(tasks_.begin(), tasks_.end(),
                                     [](const auto& other) { return !other->done(); });
  for (auto it = ended; it != tasks_.end(); ++it) (*it)->join();
  tasks_.erase(ended, tasks_.end());
  task->start();
  tasks_.push_back(std::move(task));
}

void LayerTasks::cancel_all() {
  std::lock_guard lock(mutex_);
  for (const auto& task : tasks_) task->cancel();
}

void LayerTasks::join_all() {
  std::vector<std::shared_ptr<LayerTask>> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (const auto& task : tasks) task->join_cancelled();
}

}  // namespace llmdd
