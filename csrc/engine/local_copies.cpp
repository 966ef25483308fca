#include "engine/local_copies.h"

#include <unistd.h>

#include <algorithm>
#include <string>

#include "common/status.h"

namespace llmdd {
namespace {

void check_equal(const char* what, uint64_t destination, uint64_t source) {
  if (destination == source) return;
  throw Error(Status::kParamInvalid, std::string(what) + " differs: destination " +
                                         std::to_string(destination) + ", source has " +
                                         std::to_string(source));
}

void check_row(const char* side, uint64_t row, const CacheLayout& layout) {
  if (row < layout.rows) return;
  throw Error(Status::kParamInvalid, std::string(side) + " batch index " + std::to_string(row) +
                                         " is outside [0, " + std::to_string(layout.rows) + ")");
}

uint64_t checked_size(const RowCopy& copy, const CacheLayout& src, const CacheLayout& dst) {
  uint64_t shorter = std::min(src.stride, dst.stride);
  if (copy.offset >= shorter) {
    throw Error(Status::kParamInvalid, "offset " + std::to_string(copy.offset) +
                                           " is outside [0, " + std::to_string(shorter) + ")");
  }
  uint64_t size = copy.size < 0 ? src.stride - copy.offset : static_cast<uint64_t>(copy.size);
  if (size > shorter - copy.offset) {
    throw Error(Status::kParamInvalid, std::to_string(size) + " bytes from offset " +
                                           std::to_string(copy.offset) + " do not fit rows of " +
                                           std::to_string(src.stride) + " (source) and " +
                                           std::to_string(dst.stride) + " bytes (destination)");
  }
  return size;
}

}  // namespace

std::shared_ptr<Cache> LocalCopies::open(const LocalCache& cache) const {
  if (cache.id != LocalCache::kUnregistered) return caches_.get(cache.id);
  auto unregistered = std::make_shared<Cache>();
  unregistered->layout = layout_of(cache.spec);
  return unregistered;
}

void LocalCopies::copy(const Cache& src, const std::shared_ptr<Cache>& dst,
                       std::vector<ByteRun> runs) {
  check_equal("number of tensors", dst->layout.tensor_addrs.size(), src.layout.tensor_addrs.size());
  CacheUse use = caches_.use(dst);
  CopyPlan plan{src.layout.tensor_addrs, dst->layout.tensor_addrs, std::move(runs)};
  copy_from_process(::getpid(), plan, [&] {
    src.check_open();
    use.check_open();
  });
}

void LocalCopies::copy_row(int64_t dst_id, int64_t src_id, const RowCopy& copy_of) {
  std::shared_ptr<Cache> dst = caches_.get(dst_id);
  std::shared_ptr<Cache> src = caches_.get(src_id);
  check_row("destination", copy_of.dst_row, dst->layout);
  check_row("source", copy_of.src_row, src->layout);
  uint64_t size = checked_size(copy_of, src->layout, dst->layout);
  copy(*src, dst,
       {{copy_of.src_row * src->layout.stride + copy_of.offset,
         copy_of.dst_row * dst->layout.stride + copy_of.offset, size}});
}

void LocalCopies::copy_blocks(int64_t cache_id, const std::vector<uint64_t>& src,
                              const std::vector<uint64_t>& dst) {
  std::shared_ptr<Cache> cache = caches_.get(cache_id);
  check_indices(src, cache->layout.rows, "source");
  check_indices(dst, cache->layout.rows, "destination");
  // Not merged: a block may be written by one pair and read by a later one.
  std::vector<BlockRun> pairs;
  for (size_t i = 0; i < src.size(); ++i) pairs.push_back({src[i], dst[i], 1});
  copy(*cache, cache, to_bytes(pairs, cache->layout.stride));
}

void LocalCopies::move_blocks(const LocalCache& src, const LocalCache& dst,
                              const std::vector<uint64_t>& src_blocks,
                              const std::vector<uint64_t>& dst_blocks) {
  std::shared_ptr<Cache> source = open(src);
  std::shared_ptr<Cache> destination = open(dst);
  check_equal("block size", destination->layout.stride, source->layout.stride);
  check_indices(src_blocks, source->layout.rows, "source");
  check_indices(dst_blocks, destination->layout.rows, "destination");
  copy(*source, destination, to_bytes(merge_blocks(src_blocks, dst_blocks), source->layout.stride));
}

}  // namespace llmdd
