// Memory of this process that peers can map: pages of one memfd, put in the place of the private
// pages of some ranges.
//
// Addresses and contents stay. What another thread writes while its page is replaced may be lost,
// so this happens before there is traffic, when memory is registered. The file can change its size
// no more, has all its pages, and takes no new writable mapping, so that a peer can neither write
// it nor be hurt by it. Contents move a piece at a time: at most one piece is there twice.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "shm/interval.h"

namespace llmdd {

// `length` bytes at `addr` are those at `offset` of the file. All are whole pages.
struct SharedRange {
  uint64_t addr = 0;
  uint64_t length = 0;
  uint64_t offset = 0;
};

enum class Contents { kKept, kZero };  // kZero: nothing was written there yet

class SharedFile {
 public:
  // Replaces as much of `wanted` (disjoint whole pages) as there is memory for. Empty if that is
  // nothing. `shortage` says why not everything, if so.
  static std::shared_ptr<SharedFile> replace(const Intervals& wanted, Contents contents,
                                             std::string& shortage);
  ~SharedFile() { withdraw(); }
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  uint64_t id() const { return id_; }
  int fd() const { return fd_.get(); }  // read-only
  uint64_t size() const { return size_; }
  const std::vector<SharedRange>& ranges() const { return ranges_; }
  Intervals intervals() const;

  // The memory becomes private to this process again, contents kept, also while others write it.
  // What is no longer mapped from this file is left alone. Called once nobody uses it any more.
  void withdraw();
  bool withdrawn() const { return withdrawn_; }

 private:
  SharedFile(UniqueFd fd, std::vector<SharedRange> ranges);

  const uint64_t id_;
  const UniqueFd fd_;
  const std::vector<SharedRange> ranges_;
  const uint64_t size_;
  std::atomic<bool> withdrawn_{false};
};

// Why memory of this process cannot be shared at all; empty if it can.
const std::string& shared_memory_refusal();

// Tests only: the system has no more than this for shared memory; 0 ends that.
void limit_shared_memory(uint64_t bytes);

}  // namespace llmdd
