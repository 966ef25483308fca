#include "shm/shared_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "common/socket_io.h"
#include "shm/address_space.h"
#include "shm/fork_guard.h"
#include "shm/memory_limit.h"

// Of newer kernels' headers.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace llmdd {
namespace {

constexpr uint64_t kPieceBytes = 32ULL << 20;
// Left to the rest of the process, and to what others of its control group take meanwhile.
constexpr uint64_t kReserveBytes = 32ULL << 20;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;

std::atomic<uint64_t> g_limit{0};

// Shows in /proc/PID/maps only.
UniqueFd create_file() {
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(::memfd_create("llmdd-kv", flags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = UniqueFd(::memfd_create("llmdd-kv", flags));
  if (fd) ::fchmod(fd.get(), S_IRUSR | S_IWUSR);
  return fd;
}

UniqueFd reopen_read_only(int fd) {
  std::string path = "/proc/self/fd/" + std::to_string(fd);
  return UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
}

void* at(uint64_t addr) { return reinterpret_cast<void*>(addr); }

std::string try_to_share() {
  UniqueFd fd = create_file();
  if (!fd) return "memfd_create failed: " + errno_text(errno);
  void* page = MAP_FAILED;
  if (::ftruncate(fd.get(), static_cast<off_t>(page_bytes())) == 0) {
    page = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (page == MAP_FAILED) return "a memfd cannot be mapped: " + errno_text(errno);
  std::string refusal;
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    refusal = "a memfd cannot be sealed against writers (" + errno_text(errno) + "), Linux 5.1 can";
  } else if (!reopen_read_only(fd.get())) {
    refusal = "/proc/self/fd cannot be opened: " + errno_text(errno);
  }
  ::munmap(page, page_bytes());
  return refusal;
}

uint64_t total_length(const Intervals& intervals) {
  uint64_t total = 0;
  for (const Interval& interval : intervals) total += interval.length();
  return total;
}

// Moves ranges into a file, one after the other.
class Replacement {
 public:
  explicit Replacement(Contents contents) : contents_(contents), file_(create_file()) {}

  // False at the first shortage.
  bool open(uint64_t total) {
    if (!file_) return fails("memfd_create");
    rlimit limit{};
    // Beyond it the kernel sends SIGXFSZ.
    if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < total) {
      shortage_ = "RLIMIT_FSIZE is " + std::to_string(limit.rlim_cur) + " bytes";
      return false;
    }
    return ::ftruncate(file_.get(), static_cast<off_t>(total)) == 0 || fails("ftruncate");
  }

  bool add(const Interval& interval) {
    SharedRange range{interval.begin, 0, size_};
    while (range.length < interval.length() &&
           move_piece(range, std::min(kPieceBytes, interval.length() - range.length))) {
    }
    if (range.length > 0) ranges_.push_back(range);
    return range.length == interval.length();
  }

  // What has not been moved is cut off. The file must not be left writable for others.
  UniqueFd seal() {
    UniqueFd reader = reopen_read_only(file_.get());
    bool sealed = ::ftruncate(file_.get(), static_cast<off_t>(size_)) == 0 &&
                  ::fcntl(file_.get(), F_ADD_SEALS, kSeals) == 0;
    if (!reader || !sealed) fails("sealing");
    return sealed ? std::move(reader) : UniqueFd();
  }

  // Private pages again, when there is no reader.
  void undo() {
    for (const SharedRange& range : ranges_) {
      ::mmap(at(range.addr), range.length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED,
             file_.get(), static_cast<off_t>(range.offset));
    }
  }

  const std::vector<SharedRange>& ranges() const { return ranges_; }
  const std::string& shortage() const { return shortage_; }

 private:
  bool fails(const char* what) {
    shortage_ = std::string(what) + ": " + errno_text(errno);
    return false;
  }

  bool move_piece(SharedRange& range, uint64_t length) {
    uint64_t limit = g_limit;
    if (!has_room(length)) return false;
    errno = ENOMEM;
    // Memory is taken here, so that a shortage is an error and not a signal at first touch.
    if ((limit != 0 && size_ + length > limit) || !allocate(length)) return fails("fallocate");
    uint64_t addr = range.addr + range.length;
    if (contents_ == Contents::kKept && !write(addr, length)) return fails("copying to a memfd");
    // Looked up at once: one page fault for each page costs as much as the first copy of it.
    void* mapped =
        ::mmap(at(addr), length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
               file_.get(), static_cast<off_t>(size_));
    if (mapped == MAP_FAILED) return fails("mmap");
    ::madvise(mapped, length, MADV_DONTFORK);
    range.length += length;
    size_ += length;
    return true;
  }

  // fallocate(2) beyond the limit of a control group is no error: the kernel kills the process.
  bool has_room(uint64_t length) {
    uint64_t room = memory_headroom();
    if (room >= length + kReserveBytes) return true;
    shortage_ = "the memory limit of its control group leaves " + std::to_string(room) +
                " bytes, " + std::to_string(length + kReserveBytes) + " are needed";
    return false;
  }

  bool allocate(uint64_t length) {
    int result = -1;
    do {
      result = ::fallocate(file_.get(), 0, static_cast<off_t>(size_), static_cast<off_t>(length));
    } while (result != 0 && errno == EINTR);
    return result == 0;
  }

  bool write(uint64_t addr, uint64_t length) {
    for (uint64_t done = 0; done < length;) {
      ssize_t count =
          ::pwrite(file_.get(), at(addr + done), length - done, static_cast<off_t>(size_ + done));
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return false;
      done += static_cast<uint64_t>(count);
    }
    return true;
  }

  const Contents contents_;
  const UniqueFd file_;
  uint64_t size_ = 0;
  std::vector<SharedRange> ranges_;
  std::string shortage_;
};

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

uint64_t inode_of(int fd) {
  struct stat info{};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

uint64_t size_of(const std::vector<SharedRange>& ranges) {
  return ranges.back().offset + ranges.back().length;
}

}  // namespace

const std::string& shared_memory_refusal() {
  static const std::string refusal = try_to_share();
  return refusal;
}

void limit_shared_memory(uint64_t bytes) { g_limit = bytes; }

SharedFile::SharedFile(UniqueFd fd, std::vector<SharedRange> ranges)
    : id_(next_id()), fd_(std::move(fd)), ranges_(std::move(ranges)), size_(size_of(ranges_)) {}

std::shared_ptr<SharedFile> SharedFile::replace(const Intervals& wanted, Contents contents,
                                                std::string& shortage) {
  Replacement replacement(contents);
  std::unique_lock forks = hold_forks();
  bool whole = replacement.open(total_length(wanted)) &&
               std::all_of(wanted.begin(), wanted.end(),
                           [&](const Interval& interval) { return replacement.add(interval); });
  UniqueFd reader;
  if (!replacement.ranges().empty()) reader = replacement.seal();
  if (!whole || !reader) shortage = replacement.shortage();
  if (!reader) {
    replacement.undo();
    return nullptr;
  }
  for (const SharedRange& range : replacement.ranges()) {
    guard_range(forks, range.addr, range.length, range.offset, reader.get());
  }
  return std::shared_ptr<SharedFile>(new SharedFile(std::move(reader), replacement.ranges()));
}

Intervals SharedFile::intervals() const {
  Intervals intervals;
  for (const SharedRange& range : ranges_) {
    intervals.push_back({range.addr, range.addr + range.length});
  }
  return intervals;
}

void SharedFile::withdraw() {
  if (withdrawn_.exchange(true)) return;
  std::unique_lock forks = hold_forks();
  uint64_t inode = inode_of(fd_.get());
  Interval span{ranges_.front().addr, ranges_.front().addr};
  for (const SharedRange& range : ranges_) {
    span.begin = std::min(span.begin, range.addr);
    span.end = std::max(span.end, range.addr + range.length);
  }
  for (const MappedArea& area : mapped_areas(span.begin, span.end, Detail::kAreas)) {
    // In a forked child, or after the user has unmapped its memory, this is not the shared file.
    if (!area.shared() || area.inode != inode) continue;
    for (const SharedRange& range : ranges_) {
      uint64_t begin = std::max(area.begin, range.addr);
      uint64_t end = std::min(area.end, range.addr + range.length);
      if (begin >= end) continue;
      uint64_t offset = range.offset + (begin - range.addr);
      ::mmap(at(begin), end - begin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd_.get(),
             static_cast<off_t>(offset));
    }
  }
  unguard_file(forks, fd_.get());
}

}  // namespace llmdd
