// Where the bytes of one registered cache lie.
#pragma once

#include <cstdint>
#include <vector>

namespace llmdd {

// A cache is a list of tensors of one shape. The first dimension counts rows: the batch rows of a
// contiguous cache, the blocks of a blocks cache. Row r of a tensor starts at base + r * stride.
struct CacheLayout {
  uint64_t rows = 0;
  uint64_t stride = 0;  // bytes of one row in one tensor
  bool is_blocks = false;
  bool remote_accessible = false;
  bool host_placed = false;
  std::vector<uint64_t> tensor_addrs;

  uint64_t tensor_bytes() const { return rows * stride; }
};

struct CacheSpec {
  std::vector<int64_t> shape;
  uint64_t element_bytes = 0;
  bool is_blocks = false;
  bool remote_accessible = false;
  bool host_placed = false;
  std::vector<uint64_t> tensor_addrs;
};

// Throws Error(kParamInvalid) for a shape or an address the engine cannot serve.
CacheLayout layout_of(const CacheSpec& spec);

// Whether one of the tensors holds all these bytes.
bool contains_bytes(const CacheLayout& layout, uint64_t addr, uint64_t length);

}  // namespace llmdd
