#include "engine/meeting_point.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>

#include "common/socket_io.h"
#include "common/status.h"
#include "engine/socket_directory.h"

namespace llmdd {
namespace {

constexpr size_t kMaxNameBytes = 64;  // everything behind the base directory

class Fnv1a {
 public:
  void add(uint8_t byte) { hash_ = (hash_ ^ byte) * 0x100000001B3ULL; }
  void add(uint64_t value) {
    for (int shift = 0; shift < 64; shift += 8) add(static_cast<uint8_t>(value >> shift));
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xCBF29CE484222325ULL;
};

uint64_t hash_of(const CommSpec& spec) {
  Fnv1a hash;
  hash.add(static_cast<uint64_t>(spec.name.size()));
  for (char letter : spec.name) hash.add(static_cast<uint8_t>(letter));
  for (auto [cluster_id, rank] : spec.members) {
    hash.add(cluster_id);
    hash.add(static_cast<uint64_t>(rank));
  }
  return hash.value();
}

void check_private(const std::string& directory) {
  struct stat facts{};
  bool known = ::lstat(directory.c_str(), &facts) == 0;
  if (known && S_ISDIR(facts.st_mode) && facts.st_uid == ::geteuid() &&
      (facts.st_mode & 077) == 0) {
    return;
  }
  throw Error(Status::kLinkFailed,
              directory +
                  " is not a directory that only this user can enter; remove it, or set "
                  "TMPDIR to the same writable directory for all members");
}

std::string private_directory() {
  std::string directory = socket_base(kMaxNameBytes) + "/llmdd-" + std::to_string(::geteuid());
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    throw Error(Status::kLinkFailed, "cannot create the directory " + directory + ": " +
                                         errno_text(errno) + "; set TMPDIR to a writable one");
  }
  check_private(directory);
  return directory;
}

ino_t inode_of(const std::string& path) {
  struct stat facts{};
  return ::lstat(path.c_str(), &facts) == 0 ? facts.st_ino : 0;
}

std::string unused_path(const std::string& path) {
  static std::atomic<uint32_t> counter{0};
  return path + "." + std::to_string(::getpid()) + "." + std::to_string(counter++);
}

}  // namespace

std::string meeting_path(const CommSpec& spec, size_t member) {
  char name[32];
  std::snprintf(name, sizeof(name), "/%016llx-%zu", static_cast<unsigned long long>(hash_of(spec)),
                member);
  return private_directory() + name;
}

// Bound under another name first: rename(2) replaces a stale socket, which bind(2) cannot.
MeetingPoint::MeetingPoint(const std::string& path) : path_(path) {
  std::string unused = unused_path(path);
  listener_ = listen_unix(unused);
  inode_ = inode_of(unused);
  if (::rename(unused.c_str(), path.c_str()) == 0) return;
  int error = errno;
  ::unlink(unused.c_str());
  throw Error(Status::kLinkFailed, "cannot create the socket " + path + ": " + errno_text(error));
}

MeetingPoint::~MeetingPoint() {
  if (inode_of(path_) == inode_) ::unlink(path_.c_str());
}

}  // namespace llmdd
