// Copies inside this process: between caches, and between a cache and plain host memory.
//
// They read through process_vm_readv(2) like pulls, so that memory which is no longer mapped ends
// in an error.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/cache_table.h"
#include "engine/copier.h"
#include "model/cache_layout.h"

namespace llmdd {

struct RowCopy {
  uint64_t dst_row = 0;
  uint64_t src_row = 0;
  uint64_t offset = 0;  // on both sides
  int64_t size = -1;    // -1: the rest of the source row
};

// A cache of the table, or memory that was never registered.
struct LocalCache {
  static constexpr int64_t kUnregistered = -1;
  int64_t id = kUnregistered;
  CacheSpec spec;  // for kUnregistered only
};

// All throw Error: kKvCacheNotExist for an unknown cache, kParamInvalid for what does not fit.
class LocalCopies {
 public:
  explicit LocalCopies(CacheTable& caches) : caches_(caches) {}

  void copy_row(int64_t dst_id, int64_t src_id, const RowCopy& copy);
  // Pairs (source, destination) of blocks, copied in this order.
  void copy_blocks(int64_t cache_id, const std::vector<uint64_t>& src,
                   const std::vector<uint64_t>& dst);
  // Blocks of one cache to those of another, of equal block size and number of tensors.
  void move_blocks(const LocalCache& src, const LocalCache& dst,
                   const std::vector<uint64_t>& src_blocks,
                   const std::vector<uint64_t>& dst_blocks);

 private:
  std::shared_ptr<Cache> open(const LocalCache& cache) const;
  void copy(const Cache& src, const std::shared_ptr<Cache>& dst, std::vector<ByteRun> runs);

  CacheTable& caches_;
};

}  // namespace llmdd
