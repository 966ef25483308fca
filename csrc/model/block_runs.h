// Lists of block pairs, turned into as few pieces as possible.
#pragma once

#include <cstdint>
#include <vector>

namespace llmdd {

// `count` blocks from `src` on go to the blocks from `dst` on.
struct BlockRun {
  uint64_t src = 0;
  uint64_t dst = 0;
  uint64_t count = 0;
};

// The same in bytes, relative to the start of a tensor.
struct ByteRun {
  uint64_t src_offset = 0;
  uint64_t dst_offset = 0;
  uint64_t length = 0;
};

// Merges neighbouring pairs that are consecutive on both sides. The order is kept, so of two
// sources for one destination the last wins. Both lists have the same length (checked by the
// caller).
std::vector<BlockRun> merge_blocks(const std::vector<uint64_t>& src,
                                   const std::vector<uint64_t>& dst);

std::vector<ByteRun> to_bytes(const std::vector<BlockRun>& runs, uint64_t block_bytes);

// Cuts a row of `row_bytes` at `row_offset` into chunks: chunk i goes to block dst[i]. The list may
// be shorter than the row; the row's last chunk may be shorter than a block.
std::vector<ByteRun> row_to_blocks(uint64_t row_offset, uint64_t row_bytes, uint64_t block_bytes,
                                   const std::vector<uint64_t>& dst);

// Throws Error(kParamInvalid) unless every index is below `num_blocks`; `side` names the list.
void check_indices(const std::vector<uint64_t>& blocks, uint64_t num_blocks, const char* side);

}  // namespace llmdd
