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
  // Called from any thread.
  virtual void wake() {}
  // Called on the task's thread after its last `wait`.
  virtual void finish() {}
};

}  // namespace llmdd
