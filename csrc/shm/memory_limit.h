// How much more memory the control groups of this process leave it, cgroups(7). Beyond that the
// kernel answers no system call with an error: it kills a process of the group.
#pragma once

#include <cstdint>
#include <string>

namespace llmdd {

// Bytes, the least of all levels of both versions of control groups; UINT64_MAX where there is no
// limit, or none that can be read. Cached pages of files count as free, because the kernel takes
// them first; swap does not. `proc` has the files `cgroup` and `mountinfo` of a process.
uint64_t memory_headroom(const std::string& proc = "/proc/self");

}  // namespace llmdd
