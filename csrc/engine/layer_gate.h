// What tells a layer task that a layer of its source may be sent.
#pragma once

#include <atomic>
#include <cstdint>

namespace llmdd {

class LayerGate {
 public:
  virtual ~LayerGate() = default;

  // Called on the task's thread. True when the layer may be sent; false ends the task, and is the
  // answer soon after `cancelled` became true and `wake` was called. Throws Error.
  virtual bool wait(uint64_t layer, const std::atomic<bool>& cancelled) = 0;
  // Whether pushes may overlap. If not, a layer is asked for only when all earlier ones have
  // arrived, and a destination's push begins when the one before has ended.
  virtual bool allows_overlap() const { return false; }
  // True when `wait` would not sleep; else it is called with nothing under way.
  virtual bool is_open(uint64_t /*layer*/) { return false; }
  // Called from any thread.
  virtual void wake() {}
  // Called on the task's thread after its last `wait`.
  virtual void finish() {}
};

}  // namespace llmdd
