// Memory for allocated caches: one mapping, handed out in whole pages.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace llmdd {

struct PoolConfig {
  uint64_t memory_bytes = 0;
  uint32_t page_shift = 16;  // pages of 2^page_shift bytes
};

class MemoryPool;

// Memory of one cache, one piece per tensor; returns to the pool with the last owner.
class PoolMemory {
 public:
  PoolMemory(std::shared_ptr<MemoryPool> pool, size_t count, uint64_t bytes);
  PoolMemory(const PoolMemory&) = delete;
  PoolMemory& operator=(const PoolMemory&) = delete;
  ~PoolMemory();

  const std::vector<uint64_t>& addrs() const { return addrs_; }

 private:
  void give_back();

  const std::shared_ptr<MemoryPool> pool_;
  const uint64_t bytes_;
  std::vector<uint64_t> addrs_;
};

class MemoryPool {
 public:
  // Address space only; the kernel supplies memory when it is touched. Throws Error(kOutOfMemory).
  explicit MemoryPool(const PoolConfig& config);
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;
  ~MemoryPool();

  // First fit, rounded up to pages. Throws Error(kOutOfMemory).
  uint64_t allocate(uint64_t bytes);
  // `bytes` as it was allocated.
  void release(uint64_t addr, uint64_t bytes);
  uint64_t used_bytes() const;

 private:
  uint64_t round_up(uint64_t bytes) const;
  void discard(uint64_t addr, uint64_t bytes) const;

  const uint64_t page_bytes_;
  const uint64_t capacity_;  // whole pages
  uint64_t base_ = 0;
  mutable std::mutex mutex_;
  uint64_t used_ = 0;
  std::map<uint64_t, uint64_t> free_;  // offset -> length; neighbours are merged
};

}  // namespace llmdd
