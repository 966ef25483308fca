// The HostEngine as a Python class: conversions and dropping the GIL, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings/bind.h"
#include "bindings/convert.h"
#include "bindings/py_engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

std::vector<uint32_t> to_codes(const std::vector<Status>& statuses) {
  std::vector<uint32_t> codes;
  for (Status status : statuses) codes.push_back(static_cast<uint32_t>(status));
  return codes;
}

std::vector<uint32_t> link(
    PyEngine& self,
    const std::vector<std::tuple<uint64_t, std::string, uint16_t, std::string>>& targets,
    int64_t timeout_ms) {
  std::vector<DialTarget> dials;
  for (const auto& [cluster_id, ip, port, secret] : targets) {
    dials.push_back({cluster_id, ip, port, secret});
  }
  return to_codes(self.get().link(dials, timeout_ms));
}

int64_t register_cache(PyEngine& self, std::vector<int64_t> shape, uint64_t element_bytes,
                       bool remote_accessible, bool host_placed, std::vector<uint64_t> addrs,
                       const std::vector<std::tuple<uint64_t, uint64_t, uint64_t>>& keys) {
  std::vector<RowKey> row_keys;
  for (auto [req_id, prefix_id, model_id] : keys) row_keys.push_back({req_id, prefix_id, model_id});
  return self.get().register_cache(
      to_spec(std::move(shape), element_bytes, remote_accessible, host_placed, std::move(addrs)),
      row_keys);
}

int64_t register_blocks_cache(PyEngine& self, std::vector<int64_t> shape, uint64_t element_bytes,
                              bool remote_accessible, bool host_placed, std::vector<uint64_t> addrs,
                              std::optional<uint64_t> model_id) {
  CacheSpec spec =
      to_spec(std::move(shape), element_bytes, remote_accessible, host_placed, std::move(addrs));
  spec.is_blocks = true;
  return self.get().register_blocks_cache(spec, model_id);
}

void pull_blocks(PyEngine& self, uint64_t cluster_id, const RefTuple& ref, int64_t dst_cache_id,
                 const Blocks& src_blocks, const Blocks& dst_blocks, const RangeTuple& src_layers,
                 const RangeTuple& dst_layers, uint32_t tensors_per_layer) {
  self.get().pull_blocks(to_remote(cluster_id, ref), dst_cache_id, to_vector(src_blocks),
                         to_vector(dst_blocks),
                         to_layers(src_layers, dst_layers, tensors_per_layer));
}

void push_blocks(PyEngine& self, uint64_t cluster_id, const RefTuple& ref, int64_t src_cache_id,
                 const Blocks& src_blocks, const Blocks& dst_blocks, const RangeTuple& src_layers,
                 const RangeTuple& dst_layers, uint32_t tensors_per_layer, uint64_t token) {
  self.get().push_blocks({cluster_id, to_ref(ref), token, {}}, src_cache_id, to_vector(src_blocks),
                         to_vector(dst_blocks),
                         to_layers(src_layers, dst_layers, tensors_per_layer));
}

void pull_cache(PyEngine& self, uint64_t cluster_id, const RefTuple& ref, int64_t dst_cache_id,
                uint64_t batch_index, int64_t size, const RangeTuple& src_layers,
                const RangeTuple& dst_layers, uint32_t tensors_per_layer,
                std::optional<uint64_t> src_offset, std::optional<uint64_t> dst_offset) {
  self.get().pull_cache(to_remote(cluster_id, ref), dst_cache_id,
                        {batch_index, size, src_offset, dst_offset},
                        to_layers(src_layers, dst_layers, tensors_per_layer));
}

void push_cache(PyEngine& self, uint64_t cluster_id, const RefTuple& ref, int64_t src_cache_id,
                uint64_t src_batch_index, const RangeTuple& src_layers,
                const RangeTuple& dst_layers, uint32_t tensors_per_layer) {
  self.get().push_cache(to_remote(cluster_id, ref), src_cache_id, src_batch_index,
                        to_layers(src_layers, dst_layers, tensors_per_layer));
}

}  // namespace

void bind_engine(nb::module_& module) {
  nb::class_<PyEngine> engine(module, "HostEngine");
  bind_allocation(engine);
  bind_members(engine);
  engine
      .def(nb::init<uint64_t, bool, int64_t, const std::string&, uint16_t, const PoolTuple&,
                    const PoolTuple&, int64_t, uint32_t, const std::string&, const std::string&,
                    const std::string&, uint32_t, bool>(),
           "cluster_id"_a, "remote_access"_a, "sync_kv_timeout_ms"_a, "listen_ip"_a,
           "listen_port"_a, "device_pool"_a = nb::none(), "host_pool"_a = nb::none(),
           "link_total_time_ms"_a = 120'000, "link_retries"_a = 1, "transport"_a = "auto",
           "link_secret"_a = "", "nixl_library"_a = "", "staging_mib"_a = 64,
           "share_memory"_a = true)
      .def("finalize", &PyEngine::finalize, ReleaseGil())
      .def_prop_ro("listen_port",
                   [](PyEngine& self) {
                     // Who holds the listener's mutex may wait for threads that log.
                     nb::gil_scoped_release release;
                     return self.get().listen_port();
                   })
      .def("register_cache", &register_cache, "shape"_a, "element_bytes"_a, "remote_accessible"_a,
           "host_placed"_a, "addrs"_a, "keys"_a, ReleaseGil())
      .def("register_blocks_cache", &register_blocks_cache, "shape"_a, "element_bytes"_a,
           "remote_accessible"_a, "host_placed"_a, "addrs"_a, "model_id"_a.none(), ReleaseGil())
      .def(
          "unregister_cache", [](PyEngine& self, int64_t id) { self.get().unregister_cache(id); },
          "cache_id"_a, ReleaseGil())
      .def("link", &link, "targets"_a, "timeout_ms"_a, ReleaseGil())
      .def(
          "unlink",
          [](PyEngine& self, const std::vector<uint64_t>& ids, int64_t timeout_ms, bool force) {
            return to_codes(self.get().unlink(ids, timeout_ms, force));
          },
          "cluster_ids"_a, "timeout_ms"_a, "force"_a, ReleaseGil())
      .def(
          "last_link_error",
          [](PyEngine& self, uint64_t id) { return self.get().last_link_error(id); },
          "cluster_id"_a, ReleaseGil())
      .def("pull_cache", &pull_cache, "cluster_id"_a, "ref"_a, "dst_cache_id"_a, "batch_index"_a,
           "size"_a, "src_layers"_a.none(), "dst_layers"_a.none(), "tensors_per_layer"_a,
           "src_offset"_a = nb::none(), "dst_offset"_a = nb::none(), ReleaseGil())
      .def("pull_blocks", &pull_blocks, "cluster_id"_a, "ref"_a, "dst_cache_id"_a, "src_blocks"_a,
           "dst_blocks"_a, "src_layers"_a.none(), "dst_layers"_a.none(), "tensors_per_layer"_a,
           ReleaseGil())
      .def("push_cache", &push_cache, "cluster_id"_a, "ref"_a, "src_cache_id"_a,
           "src_batch_index"_a, "src_layers"_a.none(), "dst_layers"_a.none(), "tensors_per_layer"_a,
           ReleaseGil())
      .def("push_blocks", &push_blocks, "cluster_id"_a, "ref"_a, "src_cache_id"_a, "src_blocks"_a,
           "dst_blocks"_a, "src_layers"_a.none(), "dst_layers"_a.none(), "tensors_per_layer"_a,
           "token"_a = 0, ReleaseGil())
      .def(
          "inject_probe_errno",
          [](PyEngine& self, int error) { self.get().prober().inject_errno(error); }, "error"_a,
          "Tests only: probes of new links fail with this errno; 0 ends that.");
}

}  // namespace llmdd::bindings
