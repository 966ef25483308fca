#include "engine/push_source.h"

#include <numeric>
#include <string>

#include "common/status.h"

namespace llmdd {
namespace {

[[noreturn]] void invalid(const std::string& text) { throw Error(Status::kParamInvalid, text); }

}  // namespace

PushSource row_source(const CacheLayout& layout, uint64_t row) {
  uint64_t batch = layout.is_blocks ? 1 : layout.rows;
  if (row >= batch) {
    invalid("src_batch_index " + std::to_string(row) + " is outside [0, " + std::to_string(batch) +
            ")");
  }
  return {row * layout.stride, layout.stride, layout.stride, false, {{0, 0, 1}}};
}

PushSource blocks_source(const CacheLayout& layout, const std::vector<uint64_t>& src,
                         const std::vector<uint64_t>& dst) {
  if (src.empty()) invalid("there are no source blocks");
  if (src.size() != dst.size()) {
    invalid("number of blocks differs: destination " + std::to_string(dst.size()) +
            ", source has " + std::to_string(src.size()));
  }
  check_indices(src, layout.rows, "source");
  return {0, layout.tensor_bytes(), layout.stride, true, merge_blocks(src, dst)};
}

PushSource chunks_source(const CacheLayout& layout, uint64_t row, uint64_t block_bytes,
                         const std::vector<uint64_t>& dst) {
  PushSource source = row_source(layout, row);
  if (block_bytes == 0 || block_bytes >= layout.tensor_bytes()) {
    invalid("dst_block_memory_size " + std::to_string(block_bytes) + " is outside (0, " +
            std::to_string(layout.tensor_bytes()) + ")");
  }
  uint64_t chunks = (source.bytes - 1) / block_bytes + 1;
  if (dst.size() > chunks) {
    invalid(std::to_string(dst.size()) + " destination blocks for a row of " +
            std::to_string(chunks) + " chunks");
  }
  std::vector<uint64_t> src(dst.size());
  std::iota(src.begin(), src.end(), 0);
  source.block_bytes = block_bytes;
  source.to_blocks = true;
  source.runs = merge_blocks(src, dst);
  return source;
}

}  // namespace llmdd
