// Lists of blocks and ranges of layers, against a slow way to do the same.
#include <map>
#include <utility>

#include "check.h"
#include "common/status.h"
#include "model/block_runs.h"
#include "model/layer_range.h"
#include "mutate/targets.h"

namespace llmdd::test {
namespace {

// Stretches of consecutive blocks, so that there is something to merge.
std::vector<uint64_t> random_blocks(Random& random, size_t count) {
  std::vector<uint64_t> blocks;
  while (blocks.size() < count) {
    uint64_t block = random.one_in(20) ? random.awkward() : random.below(40);
    for (uint64_t i = random.between(1, 5); i > 0 && blocks.size() < count; --i) {
      blocks.push_back(block++);
    }
  }
  return blocks;
}

std::string merge(Random& random) {
  size_t count = random.below(30);
  auto src = random_blocks(random, count);
  auto dst = random_blocks(random, count);
  size_t pair = 0;
  for (const BlockRun& run : merge_blocks(src, dst)) {
    LLMDD_CHECK(run.count > 0);
    for (uint64_t i = 0; i < run.count; ++i, ++pair) {
      LLMDD_CHECK(pair < count && src[pair] == run.src + i && dst[pair] == run.dst + i);
    }
  }
  LLMDD_CHECK(pair == count);
  check_indices(src, random.awkward(), "source");
  return "merged";
}

std::string cut_row(Random& random) {
  uint64_t offset = random.below(1000);
  uint64_t row_bytes = random.between(1, 500);
  uint64_t block_bytes = random.between(1, 64);
  std::vector<uint64_t> dst = random_blocks(random, random.below(12));
  for (uint64_t& block : dst) block %= 1 << 20;
  std::map<uint64_t, uint64_t> wanted;
  for (size_t i = 0; i < dst.size(); ++i) {
    for (uint64_t byte = 0; byte < block_bytes && i * block_bytes + byte < row_bytes; ++byte) {
      wanted[dst[i] * block_bytes + byte] = offset + i * block_bytes + byte;
    }
  }
  std::map<uint64_t, uint64_t> got;
  for (const ByteRun& run : row_to_blocks(offset, row_bytes, block_bytes, dst)) {
    for (uint64_t byte = 0; byte < run.length; ++byte) {
      got[run.dst_offset + byte] = run.src_offset + byte;
    }
  }
  LLMDD_CHECK(got == wanted);
  return "cut";
}

std::string select(Random& random) {
  uint64_t tensors = random.below(40);
  auto per_layer = static_cast<uint32_t>(random.one_in(4) ? random.awkward() : random.below(4));
  LayerRange layers{random.awkward(), random.awkward()};
  TensorRange range = select_tensors(layers, tensors, per_layer);
  LLMDD_CHECK(range.count > 0 && range.count % per_layer == 0);
  LLMDD_CHECK(uint64_t{range.first} + range.count <= tensors);
  LLMDD_CHECK(range.first == layers.start * per_layer);
  LLMDD_CHECK(range.first + range.count == layers.stop * per_layer);
  return "selected";
}

}  // namespace

std::string try_runs(Random& random) {
  try {
    switch (random.below(3)) {
      case 0:
        return merge(random);
      case 1:
        return cut_row(random);
      default:
        return select(random);
    }
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace llmdd::test
