// Numbers that depend on nothing but their seed, on every machine and compiler.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

namespace llmdd::test {

// SplitMix64: a step of the golden ratio, then Stafford's mixing function number 13.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ULL;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
  }
  // In [0, bound); bound is not 0. The bias does not matter here.
  uint64_t below(uint64_t bound) { return next() % bound; }
  uint64_t between(uint64_t low, uint64_t high) { return low + below(high - low + 1); }
  bool one_in(uint64_t chances) { return below(chances) == 0; }

  template <typename T>
  const T& pick(const std::vector<T>& values) {
    return values[below(values.size())];
  }

  // Numbers at which arithmetic and comparisons go wrong, and small ones.
  uint64_t awkward() {
    switch (below(6)) {
      case 0:
        return UINT64_MAX - below(3);
      case 1:
        return (uint64_t{1} << below(64)) - below(2);
      case 2:
        return UINT32_MAX - 1 + below(4);
      case 3:
        return next();
      default:
        return below(70);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace llmdd::test
