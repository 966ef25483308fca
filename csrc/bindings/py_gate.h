// A layer gate that asks a Python callable.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>

#include "engine/layer_gate.h"

namespace llmdd::bindings {

// The GIL is held only while the callable runs. The thread keeps its Python thread state from the
// first layer to `finish`, so that thread-local values live as long as the task.
class PyGate : public LayerGate {
 public:
  explicit PyGate(nanobind::object synchronize_layer);
  ~PyGate() override;

  bool wait(uint64_t layer, const std::atomic<bool>& cancelled) override;
  void finish() override;

 private:
  bool ask(uint64_t layer);

  nanobind::object synchronize_layer_;
  std::optional<nanobind::gil_scoped_acquire> thread_state_;
  std::optional<nanobind::gil_scoped_release> released_;
};

}  // namespace llmdd::bindings
