// Shared memory is registered, copied by several threads and given up while links come and go.
#include <sys/mman.h>

#include <algorithm>
#include <numeric>

#include "race/scenarios.h"

namespace llmdd::test {
namespace {

constexpr uint64_t kPages = 512;
constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kBriefModel = 1;
constexpr uint64_t kTargetModel = 2;
constexpr int kRounds = 30;

class Pages {
 public:
  explicit Pages(uint8_t fill)
      : bytes_(static_cast<uint8_t*>(::mmap(nullptr, kPages * kPageBytes, PROT_READ | PROT_WRITE,
                                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    LLMDD_CHECK(bytes_ != MAP_FAILED);
    std::fill(bytes_, bytes_ + kPages * kPageBytes, fill);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() { ::munmap(bytes_, kPages * kPageBytes); }

  CacheSpec spec() const {
    CacheSpec spec;
    spec.shape = {kPages, kPageBytes};
    spec.element_bytes = 1;
    spec.is_blocks = true;
    spec.remote_accessible = true;
    spec.tensor_addrs = {reinterpret_cast<uint64_t>(bytes_)};
    return spec;
  }

  bool holds_only(uint8_t one, uint8_t other) const {
    return std::all_of(bytes_, bytes_ + kPages * kPageBytes,
                       [&](uint8_t byte) { return byte == one || byte == other; });
  }

 private:
  uint8_t* const bytes_;
};

// Every second page, so that there is something to share among threads and not one long run.
std::vector<uint64_t> even_pages() {
  std::vector<uint64_t> pages(kPages / 2);
  for (uint64_t i = 0; i < pages.size(); ++i) pages[i] = 2 * i;
  return pages;
}

std::vector<uint64_t> turned(std::vector<uint64_t> pages) {
  std::reverse(pages.begin(), pages.end());
  return pages;
}

}  // namespace

void shared_memory_comes_and_goes() {
  Pages source(11);
  Pages pulled(22);
  Pages pushed(22);
  TestEngine one(1);
  TestEngine two(2);
  int64_t target = one->register_blocks_cache(pulled.spec(), std::nullopt);
  one->register_blocks_cache(pushed.spec(), kTargetModel);
  int64_t lasting = two->register_blocks_cache(source.spec(), std::nullopt);
  one.link_surely(2, two.port());
  Crew crew;
  crew.repeat(
      [&] { two->unregister_cache(two->register_blocks_cache(source.spec(), kBriefModel)); });
  crew.repeat([&] {  // the last hold of the memory, too
    two->unregister_cache(lasting);
    lasting = two->register_blocks_cache(source.spec(), std::nullopt);
  });
  for (int i = 0; i < 2; ++i) {
    crew.repeat([&] {
      attempt(kVanishingCodes, [&] {
        one->pull_blocks(blocks_of(2, kBriefModel), target, even_pages(), turned(even_pages()), {});
      });
    });
  }
  crew.repeat([&] {
    int64_t brief = two->register_blocks_cache(source.spec(), std::nullopt);
    attempt(kVanishingCodes, [&] {
      two->push_blocks(push_target(1, kTargetModel), brief, even_pages(), turned(even_pages()), {});
    });
    two->unregister_cache(brief);
  });
  for (int round = 0; round < kRounds; ++round) {
    one.unlink(2, round % 2 == 0);
    one.link_surely(2, two.port());
  }
  crew.stop();
  LLMDD_CHECK(pulled.holds_only(11, 22) && pushed.holds_only(11, 22));
}

}  // namespace llmdd::test
