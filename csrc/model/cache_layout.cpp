#include "model/cache_layout.h"

#include <algorithm>
#include <string>

#include "common/status.h"

namespace llmdd {
namespace {

constexpr size_t kMaxDims = 31;

uint64_t row_bytes(const std::vector<int64_t>& shape, uint64_t element_bytes) {
  uint64_t bytes = element_bytes;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] <= 0) {
      throw Error(Status::kParamInvalid, "shape[" + std::to_string(dim) + "] is " +
                                             std::to_string(shape[dim]) + ", must be above 0");
    }
    // Also the whole tensor must be addressable, so shape[0] takes part in the overflow check.
    uint64_t whole = 0;
    if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(shape[dim]), &whole)) {
      throw Error(Status::kParamInvalid, "the size of one tensor overflows 64 bits");
    }
    bytes = whole;
  }
  return bytes / static_cast<uint64_t>(shape[0]);
}

void check_addresses(const CacheSpec& spec, uint64_t tensor_bytes) {
  for (size_t i = 0; i < spec.tensor_addrs.size(); ++i) {
    uint64_t end = 0;
    if (spec.tensor_addrs[i] == 0 ||
        __builtin_add_overflow(spec.tensor_addrs[i], tensor_bytes, &end)) {
      throw Error(Status::kParamInvalid,
                  "address " + std::to_string(i) + " is 0 or the tensor ends beyond memory");
    }
  }
}

}  // namespace

CacheLayout layout_of(const CacheSpec& spec) {
  if (spec.shape.empty() || spec.shape.size() > kMaxDims) {
    throw Error(Status::kParamInvalid, "a shape has 1 to 31 dimensions, this one has " +
                                           std::to_string(spec.shape.size()));
  }
  CacheLayout layout;
  layout.stride = row_bytes(spec.shape, spec.element_bytes);
  layout.rows = static_cast<uint64_t>(spec.shape[0]);
  layout.is_blocks = spec.is_blocks;
  layout.remote_accessible = spec.remote_accessible;
  layout.host_placed = spec.host_placed;
  layout.tensor_addrs = spec.tensor_addrs;
  check_addresses(spec, layout.tensor_bytes());
  return layout;
}

bool contains_bytes(const CacheLayout& layout, uint64_t addr, uint64_t length) {
  uint64_t size = layout.tensor_bytes();
  auto holds = [&](uint64_t tensor) {
    return addr >= tensor && addr - tensor <= size && length <= size - (addr - tensor);
  };
  return std::any_of(layout.tensor_addrs.begin(), layout.tensor_addrs.end(), holds);
}

}  // namespace llmdd
