// Which memory of this process may be replaced by shared pages.
#pragma once

#include <string>

#include "shm/interval.h"

namespace llmdd {

struct Replaceable {
  Intervals ranges;
  std::string refusal;  // why the first other area is not among them; empty if there is none
};

// Of `wanted` (sorted, disjoint, whole pages) what lies in private anonymous memory that is
// readable and writable and has no special treatment: memory of files, memory that is shared
// already, the heap below brk(2) and the stack, locked pages, huge pages that were asked for, and
// memory bound to NUMA nodes by mbind(2) stay as they are, since new pages would not be like the
// old.
Replaceable replaceable(const Intervals& wanted);

}  // namespace llmdd
