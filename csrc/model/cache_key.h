// How a peer names a cache, or one row of it.
#pragma once

#include <cstdint>

namespace llmdd {

enum class KeyKind : uint8_t {
  kRequest = 0,     // (req_id, model_id) of a CacheKey
  kPrefix = 1,      // (prefix_id, model_id) of a CacheKey
  kBlocks = 2,      // model_id of a BlocksCacheKey
  kIdAndIndex = 3,  // cache_id and batch_index of a CacheKeyByIdAndIndex
};

struct CacheRef {
  KeyKind kind = KeyKind::kBlocks;
  uint64_t id = 0;  // req_id, prefix_id or cache_id; 0 for kBlocks
  uint64_t model_id = 0;
  uint64_t row = 0;  // kIdAndIndex only
};

// The key bound to one row when a contiguous cache is registered or allocated.
struct RowKey {
  static constexpr uint64_t kInvalidId = UINT64_MAX;
  uint64_t req_id = kInvalidId;
  uint64_t prefix_id = kInvalidId;
  uint64_t model_id = 0;

  bool is_prefix() const { return prefix_id != kInvalidId; }
  // A placeholder takes a row and cannot be found.
  bool is_placeholder() const { return !is_prefix() && req_id == kInvalidId; }
  uint64_t id() const { return is_prefix() ? prefix_id : req_id; }
};

}  // namespace llmdd
