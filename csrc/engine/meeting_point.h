// The socket at which the members of one collective link() find one of them.
//
// It lies in a directory that only this user can enter, under a name made of what all members pass
// to link(). A socket that a killed process has left behind is replaced.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/unique_fd.h"

namespace llmdd {

// What every member passes: a name, and the rank of each cluster in ascending order.
struct CommSpec {
  std::string name;
  std::vector<std::pair<uint64_t, uint32_t>> members;
};

// Throws Error(kLinkFailed) when the directory is not this user's own.
std::string meeting_path(const CommSpec& spec, size_t member);

class MeetingPoint {
 public:
  explicit MeetingPoint(const std::string& path);
  MeetingPoint(const MeetingPoint&) = delete;
  MeetingPoint& operator=(const MeetingPoint&) = delete;
  ~MeetingPoint();

  int fd() const { return listener_.get(); }

 private:
  const std::string path_;
  UniqueFd listener_;
  ino_t inode_ = 0;  // another process may have replaced the socket meanwhile
};

}  // namespace llmdd
