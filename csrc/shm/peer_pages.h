// A peer's shared memory as this process has mapped it, read-only.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/unique_fd.h"
#include "shm/shared_file.h"

namespace llmdd {

// Pages of a peer, mapped here.
class PeerMapping {
 public:
  // Throws WireError for a file that could hurt this process: one that can shrink, has holes or is
  // not as large as it is said to be. Throws Error(kOutOfMemory) when it cannot be mapped.
  PeerMapping(const UniqueFd& fd, uint64_t size);
  ~PeerMapping();
  PeerMapping(const PeerMapping&) = delete;
  PeerMapping& operator=(const PeerMapping&) = delete;

  const uint8_t* bytes() const { return bytes_; }

 private:
  void populate() const;

  uint64_t size_;
  const uint8_t* bytes_ = nullptr;
  std::atomic<bool> ending_{false};
  std::thread populating_;  // looks pages up before they are needed, once
};

// `length` bytes at the peer's address `addr` are at `bytes` here.
struct PeerRange {
  uint64_t addr = 0;
  uint64_t length = 0;
  const uint8_t* bytes = nullptr;
};

// What is mapped of a peer, at one moment. Keeps the mappings.
class PeerView {
 public:
  PeerView() = default;
  explicit PeerView(std::vector<PeerRange> ranges,
                    std::vector<std::shared_ptr<const PeerMapping>> mappings);

  bool empty() const { return ranges_.empty(); }
  // The range that holds `addr`, or else the next one above it; null when there is neither.
  const PeerRange* at_or_above(uint64_t addr) const;

 private:
  std::vector<PeerRange> ranges_;  // sorted by address
  std::vector<std::shared_ptr<const PeerMapping>> mappings_;
};

class PeerPages {
 public:
  // What the peer says of one of its files; `fd` may be empty when this process had no descriptor
  // left for it. Throws WireError for what no honest peer says. Memory that cannot be mapped is
  // left out.
  void add(uint64_t file_id, uint64_t size, const std::vector<SharedRange>& ranges,
           const UniqueFd& fd);
  // The peer shares the file no more. An unknown one is no error.
  void remove(uint64_t file_id);
  // Removes everything, for good.
  void end();

  std::shared_ptr<const PeerView> view() const;
  // Why memory was left out, told once; empty if there is nothing to tell.
  std::string take_failure();

 private:
  struct File {
    std::vector<SharedRange> ranges;
    std::shared_ptr<const PeerMapping> mapping;  // empty: not mapped
  };

  void check_locked(uint64_t file_id, const std::vector<SharedRange>& ranges) const;
  void rebuild_locked();

  mutable std::mutex mutex_;
  std::map<uint64_t, File> files_;
  size_t num_ranges_ = 0;
  bool ended_ = false;
  bool failure_told_ = false;
  std::string failure_;
  std::shared_ptr<const PeerView> view_ = std::make_shared<PeerView>();
};

}  // namespace llmdd
