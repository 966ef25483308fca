#include "model/block_runs.h"

#include <algorithm>
#include <string>

#include "common/status.h"

namespace llmdd {

std::vector<BlockRun> merge_blocks(const std::vector<uint64_t>& src,
                                   const std::vector<uint64_t>& dst) {
  std::vector<BlockRun> runs;
  for (size_t i = 0; i < src.size(); ++i) {
    if (!runs.empty()) {
      BlockRun& last = runs.back();
      if (last.src + last.count == src[i] && last.dst + last.count == dst[i]) {
        ++last.count;
        continue;
      }
    }
    runs.push_back({src[i], dst[i], 1});
  }
  return runs;
}

std::vector<ByteRun> to_bytes(const std::vector<BlockRun>& runs, uint64_t block_bytes) {
  std::vector<ByteRun> bytes;
  bytes.reserve(runs.size());
  for (const BlockRun& run : runs) {
    bytes.push_back({run.src * block_bytes, run.dst * block_bytes, run.count * block_bytes});
  }
  return bytes;
}

std::vector<ByteRun> row_to_blocks(uint64_t row_offset, uint64_t row_bytes, uint64_t block_bytes,
                                   const std::vector<uint64_t>& dst) {
  uint64_t num_chunks = row_bytes / block_bytes + (row_bytes % block_bytes != 0 ? 1 : 0);
  if (dst.size() > num_chunks) {
    throw Error(Status::kParamInvalid, std::to_string(dst.size()) +
                                           " destination blocks for a row of " +
                                           std::to_string(num_chunks) + " chunks");
  }
  std::vector<ByteRun> runs;
  for (size_t i = 0; i < dst.size(); ++i) {
    uint64_t start = i * block_bytes;
    uint64_t length = std::min(block_bytes, row_bytes - start);
    if (!runs.empty() && runs.back().dst_offset + runs.back().length == dst[i] * block_bytes) {
      runs.back().length += length;
    } else {
      runs.push_back({row_offset + start, dst[i] * block_bytes, length});
    }
  }
  return runs;
}

void check_indices(const std::vector<uint64_t>& blocks, uint64_t num_blocks, const char* side) {
  auto outside = std::find_if(blocks.begin(), blocks.end(),
                              [num_blocks](uint64_t block) { return block >= num_blocks; });
  if (outside != blocks.end()) {
    throw Error(Status::kParamInvalid, std::string(side) + " block index " +
                                           std::to_string(*outside) + " is outside [0, " +
                                           std::to_string(num_blocks) + ")");
  }
}

}  // namespace llmdd
