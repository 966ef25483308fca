// Allocated caches and copies inside the process.
#include "bindings/py_engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

// Cache id (-1: not registered), then shape, element bytes and addresses for that case.
using LocalTuple = std::tuple<int64_t, std::vector<int64_t>, uint64_t, std::vector<uint64_t>>;

LocalCache to_local(const LocalTuple& cache) {
  auto [id, shape, element_bytes, addrs] = cache;
  return {id, to_spec(std::move(shape), element_bytes, false, true, std::move(addrs))};
}

std::pair<int64_t, std::vector<uint64_t>> allocate(PyEngine& self, std::vector<int64_t> shape,
                                                   uint64_t element_bytes, bool remote_accessible,
                                                   bool host_placed, size_t num_tensors,
                                                   const std::vector<KeyTuple>& keys) {
  CacheSpec spec = to_spec(std::move(shape), element_bytes, remote_accessible, host_placed, {});
  Allocated made = self.get().allocate_cache(spec, num_tensors, to_keys(keys), std::nullopt);
  return {made.id, std::move(made.tensor_addrs)};
}

std::pair<int64_t, std::vector<uint64_t>> allocate_blocks(
    PyEngine& self, std::vector<int64_t> shape, uint64_t element_bytes, bool remote_accessible,
    bool host_placed, size_t num_tensors, std::optional<uint64_t> model_id) {
  CacheSpec spec = to_spec(std::move(shape), element_bytes, remote_accessible, host_placed, {});
  spec.is_blocks = true;
  Allocated made = self.get().allocate_cache(spec, num_tensors, {}, model_id);
  return {made.id, std::move(made.tensor_addrs)};
}

void remove_key(PyEngine& self, const KeyTuple& key) {
  self.get().remove_cache_key(to_keys({key}).front());
}

void copy_row(PyEngine& self, int64_t dst_cache_id, int64_t src_cache_id, uint64_t dst_row,
              uint64_t src_row, uint64_t offset, int64_t size) {
  self.get().copy_row(dst_cache_id, src_cache_id, {dst_row, src_row, offset, size});
}

void move_blocks(PyEngine& self, const LocalTuple& src, const LocalTuple& dst,
                 const Blocks& src_blocks, const Blocks& dst_blocks) {
  self.get().move_blocks(to_local(src), to_local(dst), to_vector(src_blocks),
                         to_vector(dst_blocks));
}

}  // namespace

void bind_allocation(nb::class_<PyEngine>& engine) {
  engine
      .def("allocate_cache", &allocate, "shape"_a, "element_bytes"_a, "remote_accessible"_a,
           "host_placed"_a, "num_tensors"_a, "keys"_a, ReleaseGil())
      .def("allocate_blocks_cache", &allocate_blocks, "shape"_a, "element_bytes"_a,
           "remote_accessible"_a, "host_placed"_a, "num_tensors"_a, "model_id"_a.none(),
           ReleaseGil())
      .def(
          "deallocate_cache", [](PyEngine& self, int64_t id) { self.get().deallocate_cache(id); },
          "cache_id"_a, ReleaseGil())
      .def("remove_cache_key", &remove_key, "key"_a, ReleaseGil())
      .def(
          "pool_used_bytes",
          [](PyEngine& self, bool host_placed) { return self.get().pool_used_bytes(host_placed); },
          "host_placed"_a, ReleaseGil())
      .def("copy_row", &copy_row, "dst_cache_id"_a, "src_cache_id"_a, "dst_row"_a, "src_row"_a,
           "offset"_a, "size"_a, ReleaseGil())
      .def(
          "copy_blocks",
          [](PyEngine& self, int64_t id, const Blocks& src, const Blocks& dst) {
            self.get().copy_blocks(id, to_vector(src), to_vector(dst));
          },
          "cache_id"_a, "src"_a, "dst"_a, ReleaseGil())
      .def("move_blocks", &move_blocks, "src"_a, "dst"_a, "src_blocks"_a, "dst_blocks"_a,
           ReleaseGil());
}

}  // namespace llmdd::bindings
