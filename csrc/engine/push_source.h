// What a push sends from each tensor of a local cache, in the terms of the Push message.
#pragma once

#include <cstdint>
#include <vector>

#include "model/block_runs.h"
#include "model/cache_layout.h"

namespace llmdd {

struct PushSource {
  uint64_t offset = 0;       // from a tensor's address to the first byte
  uint64_t bytes = 0;        // from there on
  uint64_t block_bytes = 0;  // the size `runs` count in
  bool to_blocks = false;
  std::vector<BlockRun> runs;
};

// All throw Error(kParamInvalid) for what the cache does not have.

// One row; a blocks cache has one, its first block.
PushSource row_source(const CacheLayout& layout, uint64_t row);
// src[i] goes to dst[i].
PushSource blocks_source(const CacheLayout& layout, const std::vector<uint64_t>& src,
                         const std::vector<uint64_t>& dst);
// The row cut into chunks of `block_bytes`: chunk i goes to dst[i].
PushSource chunks_source(const CacheLayout& layout, uint64_t row, uint64_t block_bytes,
                         const std::vector<uint64_t>& dst);

}  // namespace llmdd
