// What the bindings of the engine take from Python, as the engine's own types.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <tuple>
#include <utility>

#include "engine/transfers.h"

namespace llmdd::bindings {

namespace nb = nanobind;

using RangeTuple = std::optional<std::pair<uint64_t, uint64_t>>;

inline std::optional<LayerRange> to_range(const RangeTuple& range) {
  if (!range) return std::nullopt;
  return LayerRange{range->first, range->second};
}

// kind, id, model id, row: see CacheRef.
using RefTuple = std::tuple<uint8_t, uint64_t, uint64_t, uint64_t>;

inline CacheRef to_ref(const RefTuple& ref) {
  auto [kind, id, model_id, row] = ref;
  return {static_cast<KeyKind>(kind), id, model_id, row};
}

inline Remote to_remote(uint64_t cluster_id, const RefTuple& ref) {
  return {cluster_id, to_ref(ref)};
}

inline Layers to_layers(const RangeTuple& src, const RangeTuple& dst, uint32_t tensors_per_layer) {
  return {to_range(src), to_range(dst), tensors_per_layer};
}

}  // namespace llmdd::bindings
