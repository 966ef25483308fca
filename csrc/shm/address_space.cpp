#include "shm/address_space.h"

#include <fcntl.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <sstream>

#include "common/unique_fd.h"

namespace llmdd {
namespace {

constexpr size_t kReadBytes = 64 << 10;
constexpr char kFlagsLine[] = "VmFlags: ";

std::string read_file(const char* path) {
  UniqueFd fd(::open(path, O_RDONLY | O_CLOEXEC));
  std::string text;
  std::vector<char> buffer(kReadBytes);
  for (ssize_t count = 1; fd && count > 0;) {
    count = ::read(fd.get(), buffer.data(), buffer.size());
    if (count > 0) text.append(buffer.data(), static_cast<size_t>(count));
  }
  return text;
}

// "7f00-7f10 rw-p 00000000 00:01 1034 /path"; false for the other lines of smaps.
bool parse_area(const std::string& line, MappedArea& area) {
  char permissions[5] = {};
  int name_at = 0;
  int fields = std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %4s %*x %*x:%*x %" SCNu64 " %n",
                           &area.begin, &area.end, permissions, &area.inode, &name_at);
  if (fields != 4) return false;
  area.permissions = permissions;
  area.name = line.substr(static_cast<size_t>(name_at));
  return true;
}

}  // namespace

std::vector<MappedArea> mapped_areas(uint64_t begin, uint64_t end, Detail detail) {
  bool flags = detail == Detail::kFlags;
  std::istringstream lines(read_file(flags ? "/proc/self/smaps" : "/proc/self/maps"));
  std::vector<MappedArea> areas;
  bool wanted = false;
  for (std::string line; std::getline(lines, line);) {
    MappedArea area;
    if (parse_area(line, area)) {
      wanted = area.begin < end && area.end > begin;
      if (wanted) areas.push_back(std::move(area));
    } else if (wanted && line.rfind(kFlagsLine, 0) == 0) {
      areas.back().flags = line.substr(sizeof(kFlagsLine) - 1);
    }
  }
  return areas;
}

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace llmdd
