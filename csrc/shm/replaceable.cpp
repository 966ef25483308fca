#include "shm/replaceable.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "shm/address_space.h"

namespace llmdd {
namespace {

struct Special {
  const char* flag;  // in VmFlags, proc_pid_smaps(5)
  const char* what;
};

constexpr Special kSpecial[] = {
    {"lo", "is locked in memory"},  {"ht", "consists of huge pages"},
    {"hg", "asks for huge pages"},  {"wf", "is wiped in forked children"},
    {"pf", "belongs to a device"},  {"io", "belongs to a device"},
    {"um", "is under userfaultfd"}, {"uw", "is under userfaultfd"},
};

// The name of our own files after they were withdrawn: such memory is private again.
constexpr char kOwnFile[] = "/memfd:llmdd-kv";

struct Policy {
  int mode = 0;
  std::array<unsigned long, 16> nodes{};

  bool operator==(const Policy& other) const { return mode == other.mode && nodes == other.nodes; }
};

// Of the memory at `addr` by itself, or of this thread for null. A container may forbid the call,
// and then the calls that set policies, too.
Policy numa_policy(void* addr) {
  Policy policy;
  unsigned long flags = addr == nullptr ? 0 : MPOL_F_ADDR;
  unsigned long bits = 8 * sizeof(policy.nodes);
  if (::syscall(SYS_get_mempolicy, &policy.mode, policy.nodes.data(), bits, addr, flags) != 0) {
    return {};
  }
  return policy;
}

// Memory without a policy of its own follows that of the thread that takes it, as new pages do.
bool is_bound(const MappedArea& area) {
  Policy own = numa_policy(reinterpret_cast<void*>(area.begin));
  return own.mode != MPOL_DEFAULT && !(own == numa_policy(nullptr));
}

bool has_flag(const MappedArea& area, const char* flag) {
  return (" " + area.flags).find(std::string(" ") + flag) != std::string::npos;
}

std::string refusal(const MappedArea& area) {
  if (area.shared()) return "is shared already";
  if (!area.writable()) return "is not readable and writable";
  bool own = area.name.rfind(kOwnFile, 0) == 0;
  if (area.inode != 0 && !own) return "is mapped from " + area.name;
  if (area.name == "[heap]" || area.name.rfind("[stack", 0) == 0) return "is " + area.name;
  for (const Special& special : kSpecial) {
    if (has_flag(area, special.flag)) return special.what;
  }
  return is_bound(area) ? "is bound to NUMA nodes" : "";
}

std::string sentence(uint64_t begin, uint64_t end, const std::string& why) {
  char range[48];
  std::snprintf(range, sizeof(range), "[%#" PRIx64 ", %#" PRIx64 ") ", begin, end);
  return "memory " + (range + why);
}

}  // namespace

Replaceable replaceable(const Intervals& wanted) {
  Replaceable result;
  if (wanted.empty()) return result;
  Intervals good;
  auto note = [&result](uint64_t begin, uint64_t end, const std::string& why) {
    if (result.refusal.empty()) result.refusal = sentence(begin, end, why);
  };
  for (const MappedArea& area :
       mapped_areas(wanted.front().begin, wanted.back().end, Detail::kFlags)) {
    Interval here{area.begin, area.end};
    if (!intersect({here}, wanted)) continue;
    std::string why = refusal(area);
    if (why.empty()) {
      good.push_back(here);
    } else {
      note(here.begin, here.end, why);
    }
  }
  good = merged(std::move(good));
  Intervals bad = subtract(wanted, good);
  if (!bad.empty()) note(bad.front().begin, bad.front().end, "is not mapped");
  result.ranges = subtract(wanted, bad);
  return result;
}

}  // namespace llmdd
