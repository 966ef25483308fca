#include "model/layer_range.h"

#include <string>

#include "common/status.h"

namespace llmdd {

TensorRange select_tensors(const std::optional<LayerRange>& layers, size_t num_tensors,
                           uint32_t tensors_per_layer) {
  if (!layers) return {0, static_cast<uint32_t>(num_tensors)};
  if (tensors_per_layer == 0 || num_tensors % tensors_per_layer != 0) {
    throw Error(Status::kParamInvalid, "tensor_num_per_layer " + std::to_string(tensors_per_layer) +
                                           " does not divide the cache's " +
                                           std::to_string(num_tensors) + " tensors");
  }
  uint64_t num_layers = num_tensors / tensors_per_layer;
  if (layers->start >= layers->stop || layers->stop > num_layers) {
    throw Error(Status::kParamInvalid, "layer range [" + std::to_string(layers->start) + ", " +
                                           std::to_string(layers->stop) + ") is outside [0, " +
                                           std::to_string(num_layers) + ")");
  }
  return {static_cast<uint32_t>(layers->start * tensors_per_layer),
          static_cast<uint32_t>((layers->stop - layers->start) * tensors_per_layer)};
}

}  // namespace llmdd
