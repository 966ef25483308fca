#include "engine/layer_marks.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace llmdd {

void MarkedStep::mark(uint64_t layer) {
  {
    std::lock_guard lock(mutex_);
    if (layer >= marked_.size()) {
      throw std::out_of_range("layer " + std::to_string(layer) + " is outside [0, " +
                              std::to_string(marked_.size()) + ")");
    }
    if (marked_[layer]) return;
    marked_[layer] = true;
  }
  changed_.notify_all();
}

void MarkedStep::mark_all() {
  {
    std::lock_guard lock(mutex_);
    std::fill(marked_.begin(), marked_.end(), true);
  }
  changed_.notify_all();
}

void MarkedStep::end(State state) {
  {
    std::lock_guard lock(mutex_);
    if (state_ != State::kAborted) state_ = state;
  }
  changed_.notify_all();
}

void MarkedStep::close() { end(State::kClosed); }

void MarkedStep::abort() { end(State::kAborted); }

bool MarkedStep::is_marked(uint64_t layer) {
  std::lock_guard lock(mutex_);
  return layer < marked_.size() && marked_[layer];
}

void MarkedStep::wake() {
  {
    std::lock_guard lock(mutex_);
  }  // a waiter between its check and its sleep must not miss it
  changed_.notify_all();
}

bool MarkedStep::wait(uint64_t layer, const std::optional<Deadline>& deadline,
                      const std::atomic<bool>* cancelled) {
  std::unique_lock lock(mutex_);
  if (layer >= marked_.size()) return false;
  auto decided = [&] {
    return marked_[layer] || state_ != State::kOpen || (cancelled != nullptr && *cancelled);
  };
  if (deadline) {
    changed_.wait_until(lock, deadline->time(), decided);
  } else {
    changed_.wait(lock, decided);
  }
  return marked_[layer] && state_ != State::kAborted && (cancelled == nullptr || !*cancelled);
}

LayerMarks::LayerMarks(uint64_t num_layers)
    : num_layers_(num_layers), step_(std::make_shared<MarkedStep>(num_layers)) {}

// Tasks that still wait would wait for ever.
LayerMarks::~LayerMarks() { step_->close(); }

void LayerMarks::reset() {
  auto next = std::make_shared<MarkedStep>(num_layers_);
  {
    std::lock_guard lock(mutex_);
    step_.swap(next);
  }
  next->close();
}

std::shared_ptr<MarkedStep> LayerMarks::step() const {
  std::lock_guard lock(mutex_);
  return step_;
}

}  // namespace llmdd
