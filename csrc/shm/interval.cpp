#include "shm/interval.h"

#include <algorithm>

namespace llmdd {

Intervals merged(Intervals intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  Intervals result;
  for (const Interval& next : intervals) {
    if (next.begin >= next.end) continue;
    if (!result.empty() && next.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, next.end);
    } else {
      result.push_back(next);
    }
  }
  return result;
}

Intervals whole_pages(const Intervals& intervals, uint64_t page) {
  Intervals result;
  for (const Interval& interval : intervals) {
    uint64_t end = interval.end / page * page;
    if (interval.begin > UINT64_MAX - page) continue;
    uint64_t begin = (interval.begin + page - 1) / page * page;
    if (begin < end) result.push_back({begin, end});
  }
  return result;
}

Intervals touched_pages(const Intervals& intervals, uint64_t page) {
  Intervals result;
  for (const Interval& interval : intervals) {
    if (interval.end > UINT64_MAX - page) continue;
    result.push_back({interval.begin / page * page, (interval.end + page - 1) / page * page});
  }
  return merged(std::move(result));
}

Intervals subtract(const Intervals& from, const Intervals& taken) {
  Intervals result;
  auto next = taken.begin();
  for (Interval rest : from) {
    while (next != taken.end() && next->end <= rest.begin) ++next;
    for (auto cut = next; cut != taken.end() && cut->begin < rest.end; ++cut) {
      if (cut->begin > rest.begin) result.push_back({rest.begin, cut->begin});
      rest.begin = std::min(rest.end, cut->end);
    }
    if (rest.begin < rest.end) result.push_back(rest);
  }
  return result;
}

bool intersect(const Intervals& left, const Intervals& right) {
  auto a = left.begin();
  auto b = right.begin();
  while (a != left.end() && b != right.end()) {
    if (a->begin < b->end && b->begin < a->end) return true;
    if (a->end < b->end) {
      ++a;
    } else {
      ++b;
    }
  }
  return false;
}

}  // namespace llmdd
