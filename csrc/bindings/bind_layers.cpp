// Layer-wise transfers and reservations as Python sees them: conversions, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <tuple>

#include "bindings/bind.h"
#include "bindings/convert.h"
#include "bindings/py_engine.h"
#include "bindings/py_gate.h"
#include "engine/layer_marks.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

// cluster id, ref, raw addresses, layers of the source, first layer of the destination, row, token.
using TargetTuple = std::tuple<uint64_t, RefTuple, std::vector<uint64_t>,
                               std::pair<uint64_t, uint64_t>, uint64_t, uint64_t, uint64_t>;

LayerTarget to_target(TargetTuple target) {
  auto& [cluster_id, ref, addrs, src_layers, first_dst_layer, row, token] = target;
  return {{cluster_id, to_ref(ref), token, std::move(addrs)},
          {src_layers.first, src_layers.second},
          first_dst_layer,
          row};
}

std::shared_ptr<LayerGate> to_gate(const nb::object& gate) {
  if (nb::isinstance<LayerMarks>(gate)) {
    return std::make_shared<MarksGate>(nb::cast<LayerMarks&>(gate).step());
  }
  return std::make_shared<PyGate>(gate);
}

std::shared_ptr<LayerTask> transfer(PyEngine& self, int64_t src_cache_id, uint64_t num_layers,
                                    uint32_t tensors_per_layer, const Blocks& src_blocks,
                                    const Blocks& dst_blocks, uint64_t dst_block_bytes,
                                    std::vector<TargetTuple> targets, const nb::object& gate) {
  LayerRequest request{
      src_cache_id,    num_layers, tensors_per_layer, to_vector(src_blocks), to_vector(dst_blocks),
      dst_block_bytes, {}};
  for (TargetTuple& target : targets) request.targets.push_back(to_target(std::move(target)));
  std::shared_ptr<LayerGate> native_gate = to_gate(gate);
  nb::gil_scoped_release release;
  return self.get().transfer(std::move(request), std::move(native_gate));
}

void check_process(const LayerTask& task) {
  if (task.own_process()) return;
  throw Error(Status::kFailed, "this transfer runs in the process that was forked");
}

bool wait(const LayerTask& task, std::optional<int64_t> timeout_ms) {
  check_process(task);
  return task.wait(timeout_ms);
}

std::vector<std::optional<uint32_t>> results(const LayerTask& task) {
  check_process(task);
  std::vector<std::optional<uint32_t>> codes;
  for (const std::optional<Status>& result : task.results()) {
    codes.push_back(result ? std::optional(static_cast<uint32_t>(*result)) : std::nullopt);
  }
  return codes;
}

// Target, layer, started, acknowledged.
using TimeTuple = std::tuple<size_t, uint64_t, int64_t, int64_t>;

std::vector<TimeTuple> layer_times(const LayerTask& task) {
  check_process(task);
  std::vector<TimeTuple> times;
  for (const LayerTime& time : task.layer_times()) {
    times.emplace_back(time.target, time.layer, time.started_ns, time.acknowledged_ns);
  }
  return times;
}

bool wait_layer(LayerMarks& marks, uint64_t layer, std::optional<int64_t> timeout_ms) {
  std::optional<Deadline> deadline;
  if (timeout_ms) deadline = Deadline::after_ms(*timeout_ms);
  return marks.step()->wait(layer, deadline, nullptr);
}

void bind_engine_methods() {
  auto engine = nb::borrow<nb::class_<PyEngine>>(nb::type<PyEngine>());
  engine
      .def("transfer", &transfer, "src_cache_id"_a, "num_layers"_a, "tensors_per_layer"_a,
           "src_blocks"_a, "dst_blocks"_a, "dst_block_bytes"_a, "targets"_a, "gate"_a)
      .def(
          "require_reservations",
          [](PyEngine& self, int64_t cache_id) { self.get().require_reservations(cache_id); },
          "cache_id"_a, ReleaseGil())
      .def(
          "open_reservation",
          [](PyEngine& self, int64_t cache_id, const Blocks& blocks) {
            return self.get().open_reservation(cache_id, to_vector(blocks));
          },
          "cache_id"_a, "blocks"_a, ReleaseGil())
      .def(
          "close_reservation",
          [](PyEngine& self, uint64_t token) { self.get().close_reservation(token); }, "token"_a,
          ReleaseGil());
}

}  // namespace

void bind_layers(nb::module_& module) {
  nb::class_<LayerTask>(module, "LayerTask")
      .def("wait", &wait, "timeout_ms"_a.none(), ReleaseGil())
      .def("results", &results)
      .def("layer_times", &layer_times);
  nb::class_<LayerMarks>(module, "LayerMarks")
      .def(nb::init<uint64_t>(), "num_layers"_a)
      .def("mark", &LayerMarks::mark, "layer"_a)
      .def("mark_all", &LayerMarks::mark_all)
      .def("reset", &LayerMarks::reset)
      .def("abort", &LayerMarks::abort)
      .def("wait", &wait_layer, "layer"_a, "timeout_ms"_a.none(), ReleaseGil());
  bind_engine_methods();
}

}  // namespace llmdd::bindings
