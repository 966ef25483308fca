// Engines and allocated caches that end while others use them.
#include <unistd.h>

#include <string>

#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr int kEngineRounds = 24;
constexpr int kCacheRounds = 2000;

void finalize_under_traffic(int round) {
  TestEngine one(1);
  TestEngine two(2);
  Traffic from_one(one, 2, two.port());
  Traffic from_two(two, 1, one.port());
  std::atomic<int> links{0};
  uint16_t port_two = two.port();
  Crew crew;
  from_one.join(crew);
  from_two.join(crew);
  crew.repeat([&] {
    attempt({Status::kFailed}, [&] {
      one.link(2, port_two);
      ++links;
    });
  });
  crew.repeat([&] {
    attempt({Status::kFailed}, [&] {
      CommSpec spec{"ends " + std::to_string(::getpid()), {{1, 0}, {2, 1}}};
      int64_t id = one->link_members(spec);
      attempt({Status::kNotYetLink, Status::kFailed}, [&] { one->unlink_members(id); });
    });
  });
  wait_for([&] { return links > round % 4; });
  std::thread other([&] { two->finalize(); });
  one->finalize();
  other.join();
  crew.stop();
  LLMDD_CHECK(!attempt({Status::kFailed}, [&] { one->linked(2); }));
}

RowKey key_of(int round) { return {static_cast<uint64_t>(round % 5), RowKey::kInvalidId, 0}; }

CacheSpec rows_spec() {
  CacheSpec spec;
  spec.shape = {2, kBlockBytes};
  spec.element_bytes = 1;
  return spec;
}

void pull_row(TestEngine& one, int64_t target, uint64_t request) {
  Remote source{2, {KeyKind::kRequest, request, 0, 0}};
  attempt({Status::kKvCacheNotExist}, [&] { one->pull_cache(source, target, {}, {}); });
}

}  // namespace

void engines_end_during_everything() {
  for (int round = 0; round < kEngineRounds; ++round) finalize_under_traffic(round);
}

void allocated_caches_are_given_back() {
  TestEngine one(1, {false, 16});
  TestEngine two(2, {false, 16});
  one.link_surely(2, two.port());
  int64_t target = one->allocate_cache(rows_spec(), 2, {}, std::nullopt).id;
  {
    Crew crew;
    crew.repeat([&] {
      for (uint64_t request = 0; request < 5; ++request) pull_row(one, target, request);
    });
    crew.repeat([&] { two->remove_cache_key(key_of(3)); });
    for (int round = 0; round < kCacheRounds;) {
      // Until a pull has used the key up, it names the cache before.
      round += attempt({Status::kKeyExists, Status::kOutOfMemory}, [&] {
        auto made = two->allocate_cache(rows_spec(), 2, {key_of(round)}, std::nullopt);
        two->deallocate_cache(made.id);
      });
    }
  }
  for (int key = 0; key < 5; ++key) two->remove_cache_key(key_of(key));
  LLMDD_CHECK(two->pool_used_bytes(false) == 0);
}

}  // namespace llmdd::test
