// Sets of addresses as sorted lists of half-open intervals.
#pragma once

#include <cstdint>
#include <vector>

namespace llmdd {

struct Interval {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t length() const { return end - begin; }
};

using Intervals = std::vector<Interval>;

// Sorted; what touches or overlaps becomes one.
Intervals merged(Intervals intervals);

// Of each interval the whole pages, which may be none.
Intervals whole_pages(const Intervals& intervals, uint64_t page);

// The pages that hold any of their bytes; sorted and disjoint like the argument.
Intervals touched_pages(const Intervals& intervals, uint64_t page);

// Both are sorted and disjoint. The bytes of `from` that are not in `taken`.
Intervals subtract(const Intervals& from, const Intervals& taken);

// Both are sorted and disjoint.
bool intersect(const Intervals& left, const Intervals& right);

}  // namespace llmdd
