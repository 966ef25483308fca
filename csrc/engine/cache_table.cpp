#include "engine/cache_table.h"

#include <algorithm>
#include <set>
#include <string>
#include <tuple>

#include "common/status.h"

namespace llmdd {
namespace {

[[noreturn]] void throw_missing(const std::string& what) {
  throw Error(Status::kKvCacheNotExist, what + " is not registered");
}

std::string describe(const CacheRef& ref) {
  std::string id = std::to_string(ref.id);
  std::string model = " of model " + std::to_string(ref.model_id);
  switch (ref.kind) {
    case KeyKind::kRequest:
      return "a cache key with req_id " + id + model;
    case KeyKind::kPrefix:
      return "a cache key with prefix_id " + id + model;
    case KeyKind::kBlocks:
      return "a blocks cache" + model;
    case KeyKind::kIdAndIndex:
      break;
  }
  return "row " + std::to_string(ref.row) + " of cache " + std::to_string(int64_t(ref.id));
}

template <typename Index>
void erase_bindings(Index& index, int64_t id) {
  for (auto it = index.begin(); it != index.end();) {
    it = it->second.first == id ? index.erase(it) : std::next(it);
  }
}

}  // namespace

CacheUse::CacheUse(CacheTable& table, std::shared_ptr<Cache> cache)
    : table_(table), cache_(std::move(cache)) {}

CacheUse::CacheUse(CacheUse&& other) noexcept
    : table_(other.table_), cache_(std::move(other.cache_)) {}

CacheUse::~CacheUse() {
  if (cache_) table_.release(*cache_);
}

void Cache::check_open() const {
  if (closed) throw_missing("cache " + std::to_string(id));
}

std::shared_ptr<Cache> CacheTable::make_locked(const CacheSpec& spec,
                                               const std::vector<RowKey>& row_keys) {
  auto cache = std::make_shared<Cache>();
  cache->id = next_id_++;
  cache->layout = layout_of(spec);
  if (row_keys.size() > cache->layout.rows) {
    throw Error(Status::kParamInvalid, std::to_string(row_keys.size()) + " keys for " +
                                           std::to_string(cache->layout.rows) + " rows");
  }
  return cache;
}

void CacheTable::insert_locked(std::shared_ptr<Cache> cache, const std::vector<RowKey>& row_keys,
                               std::optional<uint64_t> blocks_model_id) {
  int64_t id = cache->id;
  caches_.emplace(id, std::move(cache));
  bind_rows(id, row_keys);
  if (blocks_model_id) blocks_[*blocks_model_id] = id;
}

int64_t CacheTable::add(const CacheSpec& spec, const std::vector<RowKey>& row_keys,
                        std::optional<uint64_t> blocks_model_id, SharedHold shared) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Cache> cache = make_locked(spec, row_keys);
  cache->shared = std::move(shared);
  int64_t id = cache->id;
  insert_locked(std::move(cache), row_keys, blocks_model_id);
  return id;
}

Allocated CacheTable::allocate(const CacheSpec& spec, size_t num_tensors,
                               const std::shared_ptr<MemoryPool>& pool,
                               const std::vector<RowKey>& row_keys,
                               std::optional<uint64_t> blocks_model_id, SharedRegions& regions) {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Cache> cache = make_locked(spec, row_keys);
  check_unbound_locked(row_keys);
  cache->memory = std::make_unique<PoolMemory>(pool, num_tensors, cache->layout.tensor_bytes());
  cache->layout.tensor_addrs = cache->memory->addrs();
  cache->shared = regions.share(cache->layout, Contents::kZero);
  cache->references.emplace(num_tensors, row_keys);
  Allocated allocated{cache->id, cache->layout.tensor_addrs};
  insert_locked(std::move(cache), row_keys, blocks_model_id);
  return allocated;
}

void CacheTable::check_unbound_locked(const std::vector<RowKey>& row_keys) const {
  std::set<std::tuple<bool, uint64_t, uint64_t>> seen;
  for (const RowKey& key : row_keys) {
    if (key.is_placeholder()) continue;
    const RowIndex& index = key.is_prefix() ? prefixes_ : requests_;
    if (index.count({key.id(), key.model_id}) != 0 ||
        !seen.emplace(key.is_prefix(), key.id(), key.model_id).second) {
      throw Error(Status::kKeyExists,
                  describe({key.is_prefix() ? KeyKind::kPrefix : KeyKind::kRequest, key.id(),
                            key.model_id, 0}) +
                      " names a row already; pull it or call remove_cache_key first");
    }
  }
}

void CacheTable::bind_rows(int64_t id, const std::vector<RowKey>& row_keys) {
  for (uint64_t row = 0; row < row_keys.size(); ++row) {
    const RowKey& key = row_keys[row];
    if (key.is_placeholder()) continue;
    index_of(key).emplace(ModelKey{key.id(), key.model_id}, std::make_pair(id, row));
  }
}

void CacheTable::erase_locked(Cache& cache) {
  cache.closed = true;
  unbind(cache.id);
  caches_.erase(cache.id);
}

void CacheTable::remove(int64_t id) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Cache> cache = cache_of(id);
  if (!cache || cache->references) return;
  erase_locked(*cache);
  released_.wait(lock, [&cache] { return cache->users == 0; });
  lock.unlock();
  cache->shared.release();
}

void CacheTable::deallocate(int64_t id) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Cache> cache = cache_of(id);
  if (!cache || !cache->references) return;
  cache->references->drop_id();
  if (!cache->references->gone()) return;
  erase_locked(*cache);
  released_.wait(lock, [&cache] { return cache->users == 0; });
  lock.unlock();
  // Not with the cache, which a reservation that is still open keeps.
  cache->shared.release();
  cache->memory.reset();
}

void CacheTable::remove_key(const RowKey& key) {
  std::shared_ptr<Cache> cache;  // its memory is given back without the lock
  std::lock_guard lock(mutex_);
  auto bound = index_of(key).find({key.id(), key.model_id});
  if (bound == index_of(key).end()) return;
  auto [id, row] = bound->second;
  cache = cache_of(id);
  if (cache->references) return unbind_row_locked(*cache, row);
  index_of(key).erase(bound);
}

void CacheTable::unbind_row_locked(Cache& cache, uint64_t row) {
  const RowKey* key = cache.references->key_of(row);
  if (key == nullptr) return;
  index_of(*key).erase({key->id(), key->model_id});
  cache.references->drop_row(row);
  if (cache.references->gone()) erase_locked(cache);
}

void CacheTable::finish_pull(const CacheRef& ref, int64_t id, const TensorRange& tensors,
                             bool consume) {
  FoundRow found;
  std::lock_guard lock(mutex_);
  if (ref.kind == KeyKind::kBlocks) {
    found.cache = cache_of(id);  // a newer cache may have taken the key over
  } else {
    found = find_locked(ref);
  }
  if (!found.cache || found.cache->id != id) {
    throw Error(Status::kKvCacheNotExist,
                describe(ref) + " of cache " + std::to_string(id) + " was removed during the pull");
  }
  if (!consume || ref.kind == KeyKind::kBlocks || !found.cache->references) return;
  if (found.cache->references->pulled(found.row, tensors)) {
    unbind_row_locked(*found.cache, found.row);
  }
}

void CacheTable::clear() {
  std::map<int64_t, std::shared_ptr<Cache>> caches;
  std::lock_guard lock(mutex_);
  caches.swap(caches_);
  requests_.clear();
  prefixes_.clear();
  blocks_.clear();
}

void CacheTable::unbind(int64_t id) {
  erase_bindings(requests_, id);
  erase_bindings(prefixes_, id);
  for (auto it = blocks_.begin(); it != blocks_.end();) {
    it = it->second == id ? blocks_.erase(it) : std::next(it);
  }
}

std::shared_ptr<Cache> CacheTable::cache_of(int64_t id) const {
  auto found = caches_.find(id);
  return found == caches_.end() ? nullptr : found->second;
}

FoundRow CacheTable::row_of(const RowIndex& index, const CacheRef& ref) const {
  auto found = index.find({ref.id, ref.model_id});
  if (found == index.end()) return {};
  return {cache_of(found->second.first), found->second.second};
}

FoundRow CacheTable::find(const CacheRef& ref) const {
  std::lock_guard lock(mutex_);
  return find_locked(ref);
}

FoundRow CacheTable::find_locked(const CacheRef& ref) const {
  FoundRow found;
  if (ref.kind == KeyKind::kRequest) {
    found = row_of(requests_, ref);
  } else if (ref.kind == KeyKind::kPrefix) {
    found = row_of(prefixes_, ref);
  } else if (ref.kind == KeyKind::kIdAndIndex) {
    found = {cache_of(static_cast<int64_t>(ref.id)), ref.row};
  } else if (auto bound = blocks_.find(ref.model_id); bound != blocks_.end()) {
    found = {cache_of(bound->second), 0};
  }
  if (!found.cache || found.row >= found.cache->layout.rows) throw_missing(describe(ref));
  return found;
}

std::shared_ptr<Cache> CacheTable::get(int64_t id) const {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Cache> cache = cache_of(id);
  bool usable = cache && (!cache->references || cache->references->id_held());
  if (!usable) throw_missing("cache " + std::to_string(id));
  return cache;
}

CacheUse CacheTable::use(std::shared_ptr<Cache> cache) {
  std::lock_guard lock(mutex_);
  cache->check_open();
  ++cache->users;
  return CacheUse(*this, std::move(cache));
}

void CacheTable::release(Cache& cache) {
  std::lock_guard lock(mutex_);
  if (--cache.users == 0) released_.notify_all();
}

std::shared_ptr<Cache> CacheTable::containing(uint64_t addr, uint64_t length) const {
  std::lock_guard lock(mutex_);
  for (const auto& [id, cache] : caches_) {
    // What is deallocated stays for its keys, to be read only.
    bool in_use = !cache->references || cache->references->id_held();
    if (in_use && contains_bytes(cache->layout, addr, length)) return cache;
  }
  throw Error(Status::kParamInvalid, std::to_string(length) + " bytes at destination address " +
                                         std::to_string(addr) + " are not registered memory");
}

std::shared_ptr<Cache> CacheTable::readable(uint64_t addr, uint64_t length) const {
  std::lock_guard lock(mutex_);
  for (const auto& [id, cache] : caches_) {
    if (contains_bytes(cache->layout, addr, length)) return cache;
  }
  throw_missing("the memory at source address " + std::to_string(addr));
}

}  // namespace llmdd
