// The HostEngine as Python holds it, and conversions that its bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/host_engine.h"

namespace llmdd::bindings {

using Blocks =
    nanobind::ndarray<const uint64_t, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
using PoolTuple = std::optional<std::pair<uint64_t, uint32_t>>;  // bytes, page shift
using KeyTuple = std::tuple<uint64_t, uint64_t, uint64_t>;       // req id, prefix id, model id
using ReleaseGil = nanobind::call_guard<nanobind::gil_scoped_release>;

inline std::vector<uint64_t> to_vector(const Blocks& blocks) {
  return {blocks.data(), blocks.data() + blocks.shape(0)};
}

inline std::vector<RowKey> to_keys(const std::vector<KeyTuple>& keys) {
  std::vector<RowKey> row_keys;
  for (auto [req_id, prefix_id, model_id] : keys) row_keys.push_back({req_id, prefix_id, model_id});
  return row_keys;
}

inline CacheSpec to_spec(std::vector<int64_t> shape, uint64_t element_bytes, bool remote_accessible,
                         bool host_placed, std::vector<uint64_t> addrs) {
  CacheSpec spec;
  spec.shape = std::move(shape);
  spec.element_bytes = element_bytes;
  spec.remote_accessible = remote_accessible;
  spec.host_placed = host_placed;
  spec.tensor_addrs = std::move(addrs);
  return spec;
}

// Owns the engine, and abandons it in a forked child, where its threads do not exist.
class PyEngine {
 public:
  PyEngine(uint64_t cluster_id, bool remote_access, int64_t sync_kv_timeout_ms,
           const std::string& listen_ip, uint16_t listen_port, const PoolTuple& device_pool,
           const PoolTuple& host_pool, int64_t link_total_time_ms, uint32_t link_retries,
           const std::string& transport, const std::string& link_secret,
           const std::string& nixl_library, uint32_t staging_mib, bool share_memory)
      : engine_(std::make_unique<HostEngine>(EngineOptions{
            cluster_id, remote_access, sync_kv_timeout_ms, listen_ip, listen_port,
            to_pool(device_pool), to_pool(host_pool), link_total_time_ms, link_retries,
            parse_transport(transport), link_secret, nixl_library, staging_mib, share_memory})) {}

  ~PyEngine() {
    if (engine_->foreign()) {
      abandon();
    } else {
      // A link thread that is logging needs the GIL before it can be joined.
      nanobind::gil_scoped_release release;
      engine_.reset();
    }
  }

  HostEngine& get() { return *engine_; }

  void finalize() {
    if (!engine_->foreign()) engine_->finalize();
  }

 private:
  static std::optional<PoolConfig> to_pool(const PoolTuple& pool) {
    if (!pool) return std::nullopt;
    return PoolConfig{pool->first, pool->second};
  }

  void abandon() {
    static std::vector<HostEngine*> abandoned;  // reachable, so no leak checker reports it
    abandoned.push_back(engine_.release());
  }

  std::unique_ptr<HostEngine> engine_;
};

// Parts of the class that have files of their own.
void bind_allocation(nanobind::class_<PyEngine>& engine);
void bind_members(nanobind::class_<PyEngine>& engine);

}  // namespace llmdd::bindings
