// What the kernel says of this process's own address space: /proc/self/maps and smaps, proc(5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llmdd {

struct MappedArea {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::string permissions;  // as in "rw-p"
  uint64_t inode = 0;       // 0: not of a file
  std::string name;         // path, "[heap]", "[anon:…]" or empty
  std::string flags;        // two letters each, only with Detail::kFlags

  bool writable() const { return permissions.rfind("rw", 0) == 0; }
  bool shared() const { return permissions.size() == 4 && permissions[3] == 's'; }
};

enum class Detail {
  kAreas,
  kFlags,  // the kernel walks the page tables for it: seconds for hundreds of GB
};

// Areas that have bytes in [begin, end), in ascending order; empty where /proc cannot be read.
std::vector<MappedArea> mapped_areas(uint64_t begin, uint64_t end, Detail detail);

uint64_t page_bytes();

}  // namespace llmdd
