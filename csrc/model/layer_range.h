// Layers of a call, and the tensors they select.
#pragma once

#include <cstdint>
#include <optional>

namespace llmdd {

// Half open; layer k is tensors [k * per_layer, (k + 1) * per_layer).
struct LayerRange {
  uint64_t start = 0;
  uint64_t stop = 0;
};

struct TensorRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

// No range means all tensors. Throws Error(kParamInvalid) when the range does not fit
// `num_tensors`.
TensorRange select_tensors(const std::optional<LayerRange>& layers, size_t num_tensors,
                           uint32_t tensors_per_layer);

}  // namespace llmdd
