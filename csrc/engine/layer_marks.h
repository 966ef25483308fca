// The native layer synchronizer: the producer marks layers, layer tasks wait for the marks.
//
// Marks belong to a step. `reset` begins the next one; a task keeps to the step it was started in:
// it goes on with the layers that were marked, and ends at one that was not.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "engine/layer_gate.h"

namespace llmdd {

class MarkedStep {
 public:
  explicit MarkedStep(uint64_t num_layers) : marked_(num_layers, false) {}

  // Throws std::out_of_range.
  void mark(uint64_t layer);
  void mark_all();
  // No layer will be marked any more.
  void close();
  // What was marked does not count either.
  void abort();

  // False when the layer does not exist or will never be marked, at the deadline, or once
  // cancelled.
  bool wait(uint64_t layer, const std::optional<Deadline>& deadline,
            const std::atomic<bool>* cancelled);
  bool is_marked(uint64_t layer);
  void wake();

 private:
  enum class State { kOpen, kClosed, kAborted };

  void end(State state);

  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kOpen;
  std::vector<bool> marked_;
};

class LayerMarks {
 public:
  explicit LayerMarks(uint64_t num_layers);
  LayerMarks(const LayerMarks&) = delete;
  LayerMarks& operator=(const LayerMarks&) = delete;
  ~LayerMarks();

  void mark(uint64_t layer) { step()->mark(layer); }
  void mark_all() { step()->mark_all(); }
  void abort() { step()->abort(); }
  void reset();

  std::shared_ptr<MarkedStep> step() const;

 private:
  const uint64_t num_layers_;
  mutable std::mutex mutex_;
  std::shared_ptr<MarkedStep> step_;
};

class MarksGate : public LayerGate {
 public:
  explicit MarksGate(std::shared_ptr<MarkedStep> step) : step_(std::move(step)) {}

  bool wait(uint64_t layer, const std::atomic<bool>& cancelled) override {
    return step_->wait(layer, std::nullopt, &cancelled);
  }
  bool allows_overlap() const override { return true; }
  bool is_open(uint64_t layer) override { return step_->is_marked(layer); }
  void wake() override { step_->wake(); }

 private:
  const std::shared_ptr<MarkedStep> step_;
};

}  // namespace llmdd
