#include "engine/cache_table.h"

#include <algorithm>
#include <string>

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

bool contains_bytes(const CacheLayout& layout, uint64_t addr, uint64_t length) {
  uint64_t size = layout.tensor_bytes();
  auto holds = [&](uint64_t tensor) {
    return addr >= tensor && addr - tensor <= size && length <= size - (addr - tensor);
  };
  return std::any_of(layout.tensor_addrs.begin(), layout.tensor_addrs.end(), holds);
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

int64_t CacheTable::add(const CacheSpec& spec, const std::vector<RowKey>& row_keys,
                        std::optional<uint64_t> blocks_model_id) {
  std::lock_guard lock(mutex_);
  auto cache = std::make_shared<Cache>();
  cache->id = next_id_++;
  cache->layout = layout_of(spec);
  if (row_keys.size() > cache->layout.rows) {
    throw Error(Status::kParamInvalid, std::to_string(row_keys.size()) + " keys for " +
                                           std::to_string(cache->layout.rows) + " rows");
  }
  caches_.emplace(cache->id, cache);
  bind_rows(cache->id, row_keys);
  if (blocks_model_id) blocks_[*blocks_model_id] = cache->id;
  return cache->id;
}

void CacheTable::bind_rows(int64_t id, const std::vector<RowKey>& row_keys) {
  for (uint64_t row = 0; row < row_keys.size(); ++row) {
    const RowKey& key = row_keys[row];
    if (key.is_placeholder()) continue;
    RowIndex& index = key.is_prefix() ? prefixes_ : requests_;
    index.emplace(ModelKey{key.is_prefix() ? key.prefix_id : key.req_id, key.model_id},
                  std::make_pair(id, row));
  }
}

void CacheTable::remove(int64_t id) {
  std::unique_lock lock(mutex_);
  auto found = caches_.find(id);
  if (found == caches_.end()) return;
  std::shared_ptr<Cache> cache = found->second;
  cache->closed = true;
  caches_.erase(found);
  unbind(id);
  released_.wait(lock, [&cache] { return cache->users == 0; });
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
  if (!cache) throw_missing("cache " + std::to_string(id));
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
    if (contains_bytes(cache->layout, addr, length)) return cache;
  }
  throw Error(Status::kParamInvalid, std::to_string(length) + " bytes at destination address " +
                                         std::to_string(addr) + " are not registered memory");
}

bool CacheTable::contains(int64_t id) const {
  std::lock_guard lock(mutex_);
  return caches_.count(id) != 0;
}

}  // namespace llmdd
