#include "shm/shared_regions.h"

#include <algorithm>
#include <atomic>

#include "common/log.h"
#include "common/status.h"
#include "shm/address_space.h"
#include "shm/replaceable.h"

namespace llmdd {
namespace {

// Smaller pieces come from heaps that malloc(3) cuts up, and gain little.
constexpr uint64_t kMinimumBytes = 64 << 10;

std::atomic<uint64_t> g_minimum{kMinimumBytes};

Intervals tensors_of(const CacheLayout& layout) {
  Intervals tensors;
  for (uint64_t addr : layout.tensor_addrs) tensors.push_back({addr, addr + layout.tensor_bytes()});
  return merged(std::move(tensors));
}

void drop_small(Intervals& intervals) {
  uint64_t minimum = g_minimum;
  intervals.erase(std::remove_if(intervals.begin(), intervals.end(),
                                 [minimum](const Interval& i) { return i.length() < minimum; }),
                  intervals.end());
}

bool all_writable(const Intervals& wanted) {
  if (wanted.empty()) return true;
  Intervals writable;
  for (const MappedArea& area :
       mapped_areas(wanted.front().begin, wanted.back().end, Detail::kAreas)) {
    if (area.writable()) writable.push_back({area.begin, area.end});
  }
  return subtract(wanted, merged(std::move(writable))).empty();
}

bool checked_enabled(Transport transport, bool wanted) {
  if (!wanted || transport == Transport::kCma || transport == Transport::kNixl) return false;
  const std::string& refusal = shared_memory_refusal();
  if (refusal.empty()) return true;
  if (transport == Transport::kShm) {
    throw Error(Status::kFeatureNotEnabled,
                "transport is 'shm', but memory cannot be shared here: " + refusal +
                    "; set transport to 'auto' or 'cma'");
  }
  log(LogLevel::kWarning,
      "memory cannot be shared with peers, they copy by cross-memory attach: " + refusal);
  return false;
}

}  // namespace

void set_share_minimum(uint64_t bytes) { g_minimum = bytes == 0 ? kMinimumBytes : bytes; }

SharedHold::SharedHold(SharedHold&& other) noexcept
    : regions_(std::exchange(other.regions_, nullptr)),
      files_(std::move(other.files_)),
      mapped_(other.mapped_) {}

SharedHold& SharedHold::operator=(SharedHold&& other) noexcept {
  release();
  regions_ = std::exchange(other.regions_, nullptr);
  files_ = std::move(other.files_);
  mapped_ = other.mapped_;
  return *this;
}

void SharedHold::release() {
  if (SharedRegions* regions = std::exchange(regions_, nullptr)) regions->release(files_);
}

SharedRegions::SharedRegions(Transport transport, bool wanted,
                             std::function<void(uint64_t)> withdrawn)
    : transport_(transport),
      enabled_(checked_enabled(transport, wanted)),
      withdrawn_(std::move(withdrawn)) {}

// Files that others have made and that hold bytes of `wanted`.
SharedFiles SharedRegions::adopt_locked(const Intervals& wanted, Intervals& taken) {
  SharedFiles files;
  for (auto& [id, entry] : entries_) {
    Intervals own = merged(entry.file->intervals());
    if (!intersect(own, wanted)) continue;
    taken.insert(taken.end(), own.begin(), own.end());
    files.push_back(entry.file);
  }
  taken = merged(std::move(taken));
  return files;
}

std::shared_ptr<SharedFile> SharedRegions::create(const Intervals& wanted, Contents contents,
                                                  std::string& refusal) const {
  Replaceable can = replaceable(wanted);
  refusal = can.refusal;
  if (transport_ == Transport::kShm && !refusal.empty()) {
    throw Error(Status::kParamInvalid, "transport is 'shm', but " + refusal +
                                           "; allocate it as private memory or set transport to "
                                           "'auto'");
  }
  drop_small(can.ranges);
  if (can.ranges.empty()) return nullptr;
  std::string shortage;
  std::shared_ptr<SharedFile> file = SharedFile::replace(can.ranges, contents, shortage);
  if (shortage.empty()) return file;
  refusal = "there is not enough memory to share (" + shortage + ")";
  if (transport_ == Transport::kShm) {
    throw Error(Status::kOutOfMemory, "transport is 'shm', but " + refusal +
                                          "; give the process more memory or set transport to "
                                          "'auto'");
  }
  return file;
}

SharedHold SharedRegions::share(const CacheLayout& layout, Contents contents) {
  Intervals tensors = tensors_of(layout);
  bool mapped = contents == Contents::kZero || all_writable(tensors);
  if (!enabled_) return {*this, {}, mapped};
  // Pool pages may be smaller than the kernel's: an edge can hold another cache's bytes.
  bool edges = g_minimum < page_bytes() && contents == Contents::kKept;
  Intervals wanted =
      edges ? touched_pages(tensors, page_bytes()) : whole_pages(tensors, page_bytes());
  std::string refusal;
  SharedFiles files;
  {
    std::lock_guard lock(mutex_);
    Intervals taken;
    files = adopt_locked(wanted, taken);
    Intervals rest = subtract(wanted, taken);
    drop_small(rest);
    std::shared_ptr<SharedFile> file = create(rest, contents, refusal);
    if (file) {
      entries_[file->id()] = {file, 0};
      files.push_back(file);
    }
    for (const auto& used : files) ++entries_[used->id()].users;
    if (refusal_.empty()) refusal_ = refusal;
  }
  return {*this, std::move(files), mapped};
}

void SharedRegions::explain() {
  std::string refusal;
  {
    std::lock_guard lock(mutex_);
    if (refusal_.empty() || std::exchange(explained_, true)) return;
    refusal = refusal_;
  }
  log(LogLevel::kWarning,
      "some registered memory is not shared, peers copy it by cross-memory attach: " + refusal);
}

void SharedRegions::release(const SharedFiles& files) {
  SharedFiles unused;
  {
    std::lock_guard lock(mutex_);
    for (const auto& file : files) {
      auto entry = entries_.find(file->id());
      if (--entry->second.users > 0) continue;
      // Under the lock: memory that is registered again right now must be found private.
      file->withdraw();
      unused.push_back(file);
      entries_.erase(entry);
    }
  }
  for (const auto& file : unused) withdrawn_(file->id());
}

}  // namespace llmdd
