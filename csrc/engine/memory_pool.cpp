#include "engine/memory_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>

#include "common/socket_io.h"
#include "common/status.h"

namespace llmdd {
namespace {

uint64_t reserve(uint64_t bytes) {
  if (bytes == 0) return 0;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Status::kOutOfMemory, "a memory pool of " + std::to_string(bytes) +
                                          " bytes cannot be mapped: " + errno_text(errno) +
                                          "; lower its memory_size");
  }
  return reinterpret_cast<uint64_t>(memory);
}

}  // namespace

PoolMemory::PoolMemory(std::shared_ptr<MemoryPool> pool, size_t count, uint64_t bytes)
    : pool_(std::move(pool)), bytes_(bytes) {
  try {
    while (addrs_.size() < count) addrs_.push_back(pool_->allocate(bytes));
  } catch (...) {
    give_back();
    throw;
  }
}

PoolMemory::~PoolMemory() { give_back(); }

void PoolMemory::give_back() {
  for (uint64_t addr : addrs_) pool_->release(addr, bytes_);
}

MemoryPool::MemoryPool(const PoolConfig& config)
    : page_bytes_(1ULL << config.page_shift),
      capacity_(config.memory_bytes / page_bytes_ * page_bytes_),
      base_(reserve(capacity_)) {
  if (capacity_ > 0) free_[0] = capacity_;
}

// The kernel takes the memory back, also where it was shared, so that a pool costs what its caches
// hold.
void MemoryPool::discard(uint64_t addr, uint64_t bytes) const {
  static const uint64_t os_page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  uint64_t first = (addr + os_page - 1) / os_page * os_page;
  uint64_t end = (addr + bytes) / os_page * os_page;
  if (first >= end) return;
  ::mmap(reinterpret_cast<void*>(first), end - first, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

MemoryPool::~MemoryPool() {
  if (capacity_ > 0) ::munmap(reinterpret_cast<void*>(base_), capacity_);
}

uint64_t MemoryPool::round_up(uint64_t bytes) const {
  return (bytes / page_bytes_ + (bytes % page_bytes_ != 0 ? 1 : 0)) * page_bytes_;
}

uint64_t MemoryPool::allocate(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  uint64_t wanted = bytes > capacity_ ? bytes : round_up(bytes);  // no overflow
  auto fit = std::find_if(free_.begin(), free_.end(),
                          [wanted](const auto& piece) { return piece.second >= wanted; });
  if (fit == free_.end()) {
    throw Error(Status::kOutOfMemory,
                "the memory pool has no piece of " + std::to_string(bytes) +
                    " bytes: " + std::to_string(used_) + " of " + std::to_string(capacity_) +
                    " bytes are in use; deallocate caches or raise memory_size");
  }
  auto [offset, length] = *fit;
  free_.erase(fit);
  if (length > wanted) free_[offset + wanted] = length - wanted;
  used_ += wanted;
  return base_ + offset;
}

void MemoryPool::release(uint64_t addr, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  uint64_t length = round_up(bytes);
  used_ -= length;
  discard(addr, length);
  auto piece = free_.emplace(addr - base_, length).first;
  auto next = std::next(piece);
  if (next != free_.end() && piece->first + piece->second == next->first) {
    piece->second += next->second;
    free_.erase(next);
  }
  if (piece == free_.begin()) return;
  auto previous = std::prev(piece);
  if (previous->first + previous->second != piece->first) return;
  previous->second += piece->second;
  free_.erase(piece);
}

uint64_t MemoryPool::used_bytes() const {
  std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace llmdd
