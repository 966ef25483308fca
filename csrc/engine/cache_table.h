// The caches this process has registered or allocated, and the keys bound to them.
//
// Used by API threads and by link threads at once. A cache in use as a destination is held by a
// CacheUse; `remove` waits for those, so that no byte is written to a cache after it is
// unregistered.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "engine/memory_pool.h"
#include "engine/references.h"
#include "model/cache_key.h"
#include "model/cache_layout.h"
#include "model/layer_range.h"
#include "shm/shared_regions.h"

namespace llmdd {

struct Cache {
  int64_t id = 0;
  CacheLayout layout;
  std::atomic<bool> closed{false};
  std::atomic<bool> reserved_only{false};  // peers write into reservations only
  int users = 0;                           // guarded by the table's mutex
  // Of an allocated cache; a registered one has neither. The mutex guards the references, too.
  std::unique_ptr<PoolMemory> memory;
  SharedHold shared;  // of the tensors' memory; withdrawn before `memory` is given back
  std::optional<References> references;

  // Throws Error(kKvCacheNotExist) once `remove` was called: a copy has to stop.
  void check_open() const;
};

class CacheTable;

// Holds a cache open while its bytes are written.
class CacheUse {
 public:
  CacheUse(CacheTable& table, std::shared_ptr<Cache> cache);
  CacheUse(CacheUse&& other) noexcept;
  CacheUse(const CacheUse&) = delete;
  CacheUse& operator=(CacheUse&&) = delete;
  ~CacheUse();

  void check_open() const { cache_->check_open(); }

 private:
  CacheTable& table_;
  std::shared_ptr<Cache> cache_;
};

struct FoundRow {
  std::shared_ptr<Cache> cache;
  uint64_t row = 0;
};

struct Allocated {
  int64_t id = 0;
  std::vector<uint64_t> tensor_addrs;
};

class CacheTable {
 public:
  // Ids start at 1; a refused specification uses one up, as in LLM-DataDist. The first binding of a
  // row key wins, the last binding of a blocks key does.
  int64_t add(const CacheSpec& spec, const std::vector<RowKey>& row_keys,
              std::optional<uint64_t> blocks_model_id, SharedHold shared = {});
  // The same with memory of `pool` for `num_tensors` tensors. Throws Error(kKeyExists) for a row
  // key that is bound already, or given twice.
  Allocated allocate(const CacheSpec& spec, size_t num_tensors,
                     const std::shared_ptr<MemoryPool>& pool, const std::vector<RowKey>& row_keys,
                     std::optional<uint64_t> blocks_model_id, SharedRegions& regions);

  // Forgets a registered cache; an unknown id is no error. Returns when no copy into the cache runs
  // any more and its memory is this process's alone.
  void remove(int64_t id);
  // Drops the reference that the id of an allocated cache holds; the memory is freed with the last
  // one. A blocks cache is freed at once.
  void deallocate(int64_t id);
  // Unbinds a row key, if it is bound.
  void remove_key(const RowKey& key);
  // A peer has pulled these tensors of what `ref` named. Throws Error(kKvCacheNotExist) unless it
  // still names this cache. `consume` drops the row's key when all its tensors have been pulled.
  void finish_pull(const CacheRef& ref, int64_t id, const TensorRange& tensors, bool consume);
  void clear();

  // All throw Error(kKvCacheNotExist); `get` also for a deallocated cache whose keys are left. Only
  // a CacheUse keeps `remove` waiting, so it is held during a copy of this process and
  // never while another process is waited for.
  std::shared_ptr<Cache> get(int64_t id) const;
  FoundRow find(const CacheRef& ref) const;
  CacheUse use(std::shared_ptr<Cache> cache);

  // The cache one of whose tensors holds all these bytes. Throws Error(kParamInvalid).
  std::shared_ptr<Cache> containing(uint64_t addr, uint64_t length) const;
  // The same for bytes that a peer reads, which a deallocated cache keeps for its keys. Throws
  // Error(kKvCacheNotExist).
  std::shared_ptr<Cache> readable(uint64_t addr, uint64_t length) const;

 private:
  friend class CacheUse;
  using ModelKey = std::pair<uint64_t, uint64_t>;  // (req_id or prefix_id, model_id)
  using RowIndex = std::map<ModelKey, std::pair<int64_t, uint64_t>>;

  std::shared_ptr<Cache> make_locked(const CacheSpec& spec, const std::vector<RowKey>& row_keys);
  void insert_locked(std::shared_ptr<Cache> cache, const std::vector<RowKey>& row_keys,
                     std::optional<uint64_t> blocks_model_id);
  void erase_locked(Cache& cache);
  void check_unbound_locked(const std::vector<RowKey>& row_keys) const;
  RowIndex& index_of(const RowKey& key) { return key.is_prefix() ? prefixes_ : requests_; }
  void bind_rows(int64_t id, const std::vector<RowKey>& row_keys);
  void unbind(int64_t id);
  void unbind_row_locked(Cache& cache, uint64_t row);
  FoundRow row_of(const RowIndex& index, const CacheRef& ref) const;
  FoundRow find_locked(const CacheRef& ref) const;
  std::shared_ptr<Cache> cache_of(int64_t id) const;
  void release(Cache& cache);

  mutable std::mutex mutex_;
  std::condition_variable released_;
  int64_t next_id_ = 1;
  std::map<int64_t, std::shared_ptr<Cache>> caches_;
  RowIndex requests_;
  RowIndex prefixes_;
  std::map<uint64_t, int64_t> blocks_;  // model_id -> cache id
};

}  // namespace llmdd
