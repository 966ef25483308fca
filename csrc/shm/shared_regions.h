// The memory that this process's engine shares with its peers: for each registered cache the files
// that hold its pages. An engine that shares nothing leaves all memory as it is.
//
// What several caches have in common is shared once, and stays shared until the last of them is
// gone. Pieces below a minimum, and the edges of tensors that are not whole pages, are not shared;
// peers read them by cross-memory attach. A page that is only partly registered is an edge.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/transport.h"
#include "model/cache_layout.h"
#include "shm/shared_file.h"

namespace llmdd {

class SharedRegions;

using SharedFiles = std::vector<std::shared_ptr<SharedFile>>;

// A cache's part in its files. The memory of a file is withdrawn with its last hold.
class SharedHold {
 public:
  SharedHold() = default;
  SharedHold(SharedRegions& regions, SharedFiles files, bool mapped)
      : regions_(&regions), files_(std::move(files)), mapped_(mapped) {}
  SharedHold(SharedHold&& other) noexcept;
  SharedHold& operator=(SharedHold&& other) noexcept;
  ~SharedHold() { release(); }

  // Unchanged while the hold exists, also by `release`: a file tells whether it was withdrawn.
  const SharedFiles& files() const { return files_; }
  // Whether all of the cache's memory, also what is not shared, was mapped and writable.
  bool mapped() const { return mapped_; }
  void release();

 private:
  SharedRegions* regions_ = nullptr;
  SharedFiles files_;
  bool mapped_ = false;
};

class SharedRegions {
 public:
  // `wanted`: whether memory is shared at all, where `transport` allows it. `withdrawn` is called
  // without a lock after memory was withdrawn. Throws Error(kFeatureNotEnabled) for kShm where
  // nothing can be shared.
  SharedRegions(Transport transport, bool wanted, std::function<void(uint64_t file_id)> withdrawn);

  // Shares what it can of a cache's tensors, before the cache is known to anyone else; without any
  // files the hold still tells whether the tensors were mapped. Throws
  // Error(kParamInvalid or kOutOfMemory) for what kShm cannot do without. Logs nothing, as callers
  // may hold a lock.
  SharedHold share(const CacheLayout& layout, Contents contents);
  // Says why something could not be shared, once: all tensors of a model are usually alike. Without
  // a lock.
  void explain();

 private:
  friend class SharedHold;
  struct Entry {
    std::shared_ptr<SharedFile> file;
    size_t users = 0;
  };

  SharedFiles adopt_locked(const Intervals& wanted, Intervals& taken);
  std::shared_ptr<SharedFile> create(const Intervals& wanted, Contents contents,
                                     std::string& refusal) const;
  void release(const SharedFiles& files);

  const Transport transport_;
  const bool enabled_;
  const std::function<void(uint64_t)> withdrawn_;
  std::mutex mutex_;
  std::string refusal_;  // the first one
  bool explained_ = false;
  std::map<uint64_t, Entry> entries_;
};

// Tests only: the smallest piece of memory that is shared; 0: the usual one. Below the size of a
// page edges are shared, too.
void set_share_minimum(uint64_t bytes);

}  // namespace llmdd
