#include "shm/peer_pages.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "common/socket_io.h"
#include "common/status.h"
#include "engine/wire.h"
#include "shm/address_space.h"

// Of newer kernels' headers.
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace llmdd {
namespace {

constexpr size_t kMaxFiles = 4096;
constexpr size_t kMaxRanges = 64 << 10;
constexpr uint64_t kStatBlockBytes = 512;
constexpr uint64_t kPopulateStep = 8ULL << 20;
// Page tables take 1/512 of it in this process.
constexpr uint64_t kMaxPopulated = 64ULL << 30;

bool by_address(const PeerRange& a, const PeerRange& b) { return a.addr < b.addr; }

// A page that is missing would have to be found at a read, and a failure is a signal there.
void check_file(int fd, uint64_t size) {
  struct stat info{};
  int seals = ::fcntl(fd, F_GET_SEALS);
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0 || (seals & (F_SEAL_FUTURE_WRITE | F_SEAL_WRITE)) == 0) {
    throw WireError("the peer's shared memory is not a sealed memfd");
  }
  if (info.st_size < 0 || static_cast<uint64_t>(info.st_size) != size) {
    throw WireError("the peer's shared memory has " + std::to_string(info.st_size) +
                    " bytes, it was announced with " + std::to_string(size));
  }
  if (static_cast<uint64_t>(info.st_blocks) < size / kStatBlockBytes) {
    throw WireError("the peer's shared memory has pages that do not exist");
  }
}

// Ranges are those of the file one after the other, so they fill it.
void check_ranges(uint64_t size, const std::vector<SharedRange>& ranges) {
  uint64_t page = page_bytes();
  uint64_t offset = 0;
  for (const SharedRange& range : ranges) {
    bool aligned = range.addr % page == 0 && range.length % page == 0 && range.length > 0;
    uint64_t end = 0;
    if (!aligned || range.offset != offset || range.length > size - offset ||
        __builtin_add_overflow(range.addr, range.length, &end)) {
      throw WireError("the peer's shared memory has an impossible range");
    }
    offset += range.length;
  }
  if (offset != size || size == 0) throw WireError("the peer's shared memory has unused pages");
}

}  // namespace

PeerMapping::PeerMapping(const UniqueFd& fd, uint64_t size) : size_(size) {
  if (!fd) throw Error(Status::kOutOfMemory, "this process is out of descriptors");
  check_file(fd.get(), size);
  void* mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (mapped == MAP_FAILED) throw Error(Status::kOutOfMemory, "mmap: " + errno_text(errno));
  // A child would keep the peer's memory beyond the link.
  ::madvise(mapped, size, MADV_DONTFORK);
  bytes_ = static_cast<const uint8_t*>(mapped);
  try {
    populating_ = std::thread(&PeerMapping::populate, this);
  } catch (const std::system_error&) {
    // Out of threads: pages are looked up when they are first read.
  }
}

PeerMapping::~PeerMapping() {
  ending_ = true;
  if (populating_.joinable()) populating_.join();
  ::munmap(const_cast<uint8_t*>(bytes_), size_);
}

// A page fault for each block of a first copy costs as much as the copy. Kernels before 5.14
// refuse.
void PeerMapping::populate() const {
  uint64_t end = std::min(size_, kMaxPopulated);
  for (uint64_t offset = 0; offset < end && !ending_; offset += kPopulateStep) {
    void* from = const_cast<uint8_t*>(bytes_) + offset;
    if (::madvise(from, std::min(kPopulateStep, end - offset), MADV_POPULATE_READ) != 0) return;
  }
}

PeerView::PeerView(std::vector<PeerRange> ranges,
                   std::vector<std::shared_ptr<const PeerMapping>> mappings)
    : ranges_(std::move(ranges)), mappings_(std::move(mappings)) {
  std::sort(ranges_.begin(), ranges_.end(), by_address);
}

const PeerRange* PeerView::at_or_above(uint64_t addr) const {
  auto next =
      std::upper_bound(ranges_.begin(), ranges_.end(), PeerRange{addr, 0, nullptr}, by_address);
  if (next != ranges_.begin()) {
    const PeerRange& before = *std::prev(next);
    if (addr - before.addr < before.length) return &before;
  }
  return next == ranges_.end() ? nullptr : &*next;
}

void PeerPages::check_locked(uint64_t file_id, const std::vector<SharedRange>& ranges) const {
  if (files_.count(file_id) != 0) throw WireError("the peer shares a file twice");
  if (files_.size() >= kMaxFiles || num_ranges_ + ranges.size() > kMaxRanges) {
    throw WireError("the peer shares more than " + std::to_string(kMaxFiles) + " files or " +
                    std::to_string(kMaxRanges) + " ranges");
  }
  std::vector<SharedRange> all = ranges;
  for (const auto& [id, file] : files_) {
    all.insert(all.end(), file.ranges.begin(), file.ranges.end());
  }
  std::sort(all.begin(), all.end(),
            [](const SharedRange& a, const SharedRange& b) { return a.addr < b.addr; });
  for (size_t i = 1; i < all.size(); ++i) {
    if (all[i].addr - all[i - 1].addr < all[i - 1].length) {
      throw WireError("the peer shares an address twice");
    }
  }
}

void PeerPages::add(uint64_t file_id, uint64_t size, const std::vector<SharedRange>& ranges,
                    const UniqueFd& fd) {
  check_ranges(size, ranges);
  std::string failure;
  std::shared_ptr<const PeerMapping> mapping;
  try {
    mapping = std::make_shared<PeerMapping>(fd, size);
  } catch (const Error& error) {
    failure = error.what();
  }
  std::lock_guard lock(mutex_);
  if (ended_) return;
  check_locked(file_id, ranges);
  files_[file_id] = {ranges, std::move(mapping)};
  num_ranges_ += ranges.size();
  rebuild_locked();
  if (!failure_told_) failure_ = std::move(failure);
}

std::string PeerPages::take_failure() {
  std::lock_guard lock(mutex_);
  failure_told_ = failure_told_ || !failure_.empty();
  return std::exchange(failure_, {});
}

void PeerPages::remove(uint64_t file_id) {
  std::lock_guard lock(mutex_);
  auto file = files_.find(file_id);
  if (file == files_.end()) return;
  num_ranges_ -= file->second.ranges.size();
  files_.erase(file);
  rebuild_locked();
}

void PeerPages::end() {
  std::lock_guard lock(mutex_);
  ended_ = true;
  files_.clear();
  rebuild_locked();
}

// A copy under way keeps the view it has begun with.
void PeerPages::rebuild_locked() {
  std::vector<PeerRange> ranges;
  std::vector<std::shared_ptr<const PeerMapping>> mappings;
  for (const auto& [id, file] : files_) {
    if (!file.mapping) continue;
    mappings.push_back(file.mapping);
    for (const SharedRange& range : file.ranges) {
      ranges.push_back({range.addr, range.length, file.mapping->bytes() + range.offset});
    }
  }
  view_ = std::make_shared<PeerView>(std::move(ranges), std::move(mappings));
}

std::shared_ptr<const PeerView> PeerPages::view() const {
  std::lock_guard lock(mutex_);
  return view_;
}

}  // namespace llmdd
