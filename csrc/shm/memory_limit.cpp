#include "shm/memory_limit.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace llmdd {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

struct Version {
  const char* limit;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};

constexpr Version kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                      "total_active_file"};
constexpr Version kV2{"memory.max", "memory.current", "inactive_file", "active_file"};

// Where a hierarchy that may limit memory is mounted, and which part of it that is.
struct Mount {
  const Version* version;
  std::string root;
  std::string point;
};

std::vector<std::string> split(const std::string& line, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(line);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

bool has_word(const std::string& list, const std::string& word) {
  std::vector<std::string> words = split(list, ',');
  return std::find(words.begin(), words.end(), word) != words.end();
}

// None for "max", and where the file is missing.
std::optional<uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

// Cached pages of files, which leave before anybody is killed.
uint64_t reclaimable(const std::string& directory, const Version& version) {
  std::ifstream file(directory + "/memory.stat");
  uint64_t total = 0;
  std::string name;
  for (uint64_t bytes = 0; file >> name >> bytes;) {
    if (name == version.inactive_file || name == version.active_file) total += bytes;
  }
  return total;
}

uint64_t headroom_at(const std::string& directory, const Version& version) {
  std::optional<uint64_t> limit = read_number(directory + "/" + version.limit);
  std::optional<uint64_t> usage = read_number(directory + "/" + version.usage);
  if (!limit || !usage) return kUnlimited;
  uint64_t used = *usage - std::min(*usage, reclaimable(directory, version));
  return *limit - std::min(*limit, used);
}

char octal(const std::string& digits) {
  return static_cast<char>(std::strtol(digits.c_str(), nullptr, 8));
}

// The kernel writes spaces and the like as a backslash and three octal digits.
std::string unescaped(const std::string& text) {
  std::string plain;
  for (size_t i = 0; i < text.size(); ++i) {
    bool is_escape = text[i] == '\\' && i + 3 < text.size();
    plain += is_escape ? octal(text.substr(i + 1, 3)) : text[i];
    if (is_escape) i += 3;
  }
  return plain;
}

// Lines as "36 35 0:30 ROOT POINT rw,relatime shared:1 - cgroup cgroup rw,memory", proc(5).
std::vector<Mount> read_mounts(const std::string& proc) {
  std::vector<Mount> mounts;
  std::ifstream file(proc + "/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::vector<std::string> fields = split(line, ' ');
    auto dash = std::find(fields.begin(), fields.end(), "-");
    if (dash - fields.begin() < 5 || fields.end() - dash < 4) continue;
    const std::string& type = dash[1];
    const Version* version = type == "cgroup2"                                 ? &kV2
                             : type == "cgroup" && has_word(dash[3], "memory") ? &kV1
                                                                               : nullptr;
    if (version) mounts.push_back({version, unescaped(fields[3]), unescaped(fields[4])});
  }
  return mounts;
}

// Below the mount point; its top where a container sees a part only that does not tell.
std::string path_below(const Mount& mount, const std::string& path) {
  std::string root = mount.root == "/" ? "" : mount.root;
  bool is_inside = path == root || path.rfind(root + "/", 0) == 0;
  std::string below = is_inside ? path.substr(root.size()) : "";
  return below == "/" || below.find("/..") != std::string::npos ? "" : below;
}

uint64_t headroom_below(const Mount& mount, const std::string& path) {
  uint64_t least = kUnlimited;
  for (std::string below = path_below(mount, path);; below.resize(below.rfind('/'))) {
    least = std::min(least, headroom_at(mount.point + below, *mount.version));
    if (below.empty()) return least;
  }
}

}  // namespace

uint64_t memory_headroom(const std::string& proc) {
  uint64_t least = kUnlimited;
  const std::vector<Mount> mounts = read_mounts(proc);
  // Lines as "4:cpu,memory:/PATH", of version 2 "0::/PATH".
  std::ifstream file(proc + "/cgroup");
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':');
    size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    const Version* version = controllers.empty()               ? &kV2
                             : has_word(controllers, "memory") ? &kV1
                                                               : nullptr;
    for (const Mount& mount : mounts) {
      if (mount.version != version) continue;
      least = std::min(least, headroom_below(mount, line.substr(second + 1)));
    }
  }
  return least;
}

}  // namespace llmdd
