// The cache table and the reservation table under descriptors, keys and ids of any kind.
#include <map>

#include "check.h"
#include "engine/reservation_table.h"
#include "mutate/messages.h"
#include "mutate/targets.h"

namespace llmdd::test {
namespace {

CacheSpec random_spec(Random& random) {
  CacheSpec spec;
  for (uint64_t dims = random.one_in(10) ? random.below(34) : 2; dims > 0; --dims) {
    uint64_t size = random.one_in(6) ? random.awkward() : random.between(1, 9);
    spec.shape.push_back(static_cast<int64_t>(size));
  }
  spec.element_bytes = random.pick<uint64_t>({1, 2, 4, 8, 16});
  spec.is_blocks = random.one_in(2);
  for (uint64_t tensors = random.between(1, 4); tensors > 0; --tensors) {
    spec.tensor_addrs.push_back(random.one_in(8) ? random.awkward() : 0x1000 * tensors);
  }
  return spec;
}

std::vector<RowKey> random_keys(Random& random) {
  std::vector<RowKey> keys(random.below(4));
  for (RowKey& key : keys) {
    key.model_id = random.below(3);
    (random.one_in(2) ? key.req_id : key.prefix_id) = random.below(6);
  }
  return keys;
}

void check_layout(const CacheLayout& layout) {
  uint64_t size = 0;
  LLMDD_CHECK(layout.rows > 0 && layout.stride > 0);
  LLMDD_CHECK(!__builtin_mul_overflow(layout.rows, layout.stride, &size));
  for (uint64_t addr : layout.tensor_addrs) LLMDD_CHECK(addr != 0 && addr + size > addr);
}

void check_found(const CacheTable& table, Random& random) {
  CacheRef ref = random_ref(random);
  FoundRow found = table.find(ref);
  check_layout(found.cache->layout);
  LLMDD_CHECK(found.row < found.cache->layout.rows);
  LLMDD_CHECK(ref.kind != KeyKind::kBlocks || found.cache->layout.is_blocks);
  LLMDD_CHECK(ref.kind != KeyKind::kIdAndIndex || found.cache->id == static_cast<int64_t>(ref.id));
}

void check_containing(const CacheTable& table, Random& random) {
  uint64_t addr = random.one_in(2) ? random.awkward() : 0x1000 + random.below(0x4000);
  uint64_t length = random.awkward();
  std::shared_ptr<Cache> cache = table.containing(addr, length);
  const CacheLayout& layout = cache->layout;
  bool inside = false;
  for (uint64_t tensor : layout.tensor_addrs) {
    uint64_t end = tensor + layout.tensor_bytes();
    inside = inside || (addr >= tensor && addr <= end && length <= end - addr);
  }
  LLMDD_CHECK(inside);
}

void one_step(CacheTable& table, Random& random) {
  switch (random.below(6)) {
    case 0:
    case 1: {
      CacheSpec spec = random_spec(random);
      auto model = spec.is_blocks ? std::optional(random.below(3)) : std::nullopt;
      table.add(spec, spec.is_blocks ? std::vector<RowKey>{} : random_keys(random), model);
      return;
    }
    case 2:
      return table.remove(static_cast<int64_t>(random.below(8)));
    case 3:
      for (const RowKey& key : random_keys(random)) table.remove_key(key);
      return;
    case 4:
      return check_containing(table, random);
    default:
      return check_found(table, random);
  }
}

}  // namespace

std::string try_cache_table(Random& random) {
  CacheTable table;
  std::string outcome = "fine";
  for (uint64_t steps = random.between(1, 30); steps > 0; --steps) {
    try {
      one_step(table, random);
      TensorRange tensors{static_cast<uint32_t>(random.below(5)),
                          static_cast<uint32_t>(random.awkward())};
      table.finish_pull(random_ref(random), static_cast<int64_t>(random.below(8)), tensors,
                        random.one_in(2));
    } catch (const Error& error) {
      outcome = error.what();
    }
  }
  return outcome;
}

std::string try_reservations(Random& random) {
  CacheTable caches;
  ReservationTable table;
  std::map<uint64_t, std::vector<uint64_t>> open;
  std::string outcome = "fine";
  for (uint64_t steps = random.between(1, 20); steps > 0; --steps) {
    uint64_t token = open.empty() ? random.awkward() : open.begin()->first;
    try {
      if (random.one_in(3)) {
        table.close(token);
        open.erase(token);
      } else if (random.one_in(2)) {
        ReservationUse use(table, table.get(token));
        use->check_open();
        LLMDD_CHECK(use->blocks == open.at(token));
      } else {
        CacheSpec spec = random_spec(random);
        int64_t id = caches.add(spec, {}, std::nullopt);
        std::vector<uint64_t> blocks(random.below(4));
        for (uint64_t& block : blocks) block = random.one_in(6) ? random.awkward() : 0;
        uint64_t made = table.open(caches.get(id), blocks);
        LLMDD_CHECK(made != 0 && open.emplace(made, blocks).second);
      }
    } catch (const Error& error) {
      LLMDD_CHECK(error.status() != Status::kKvCacheNotExist || open.count(token) == 0);
      outcome = error.what();
    }
  }
  return outcome;
}

}  // namespace llmdd::test
