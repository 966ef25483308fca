#include "engine/copier.h"

#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <string>
#include <thread>

#include "common/socket_io.h"
#include "common/status.h"

namespace llmdd {
namespace {

constexpr size_t kMaxPieces = 1024;               // IOV_MAX
constexpr uint64_t kMaxBatchBytes = 32ULL << 20;  // a few ms, so that a deadline is seen in time

// A position in the plan: `offset` bytes into run `run` of tensor `tensor`.
struct Position {
  size_t tensor = 0;
  size_t run = 0;
  uint64_t offset = 0;
};

class Batch {
 public:
  explicit Batch(const CopyPlan& plan) : plan_(plan) {}

  // False when the plan is done.
  bool fill() {
    pieces_ = 0;
    uint64_t bytes = 0;
    Position at = start_;
    while (at.tensor < plan_.src_bases.size() && pieces_ < kMaxPieces && bytes < kMaxBatchBytes) {
      uint64_t length = std::min(plan_.runs[at.run].length - at.offset, kMaxBatchBytes - bytes);
      add(at, length);
      bytes += length;
      advance(at, length);
    }
    return pieces_ > 0;
  }

  ssize_t read_from(pid_t source) const {
    return ::process_vm_readv(source, local_.data(), pieces_, remote_.data(), pieces_, 0);
  }

  // The kernel may copy less than it was asked for; the rest is tried again.
  void consume(uint64_t bytes) {
    while (bytes > 0) {
      uint64_t length = std::min(plan_.runs[start_.run].length - start_.offset, bytes);
      advance(start_, length);
      bytes -= length;
    }
  }

 private:
  void add(const Position& at, uint64_t length) {
    const ByteRun& run = plan_.runs[at.run];
    uint64_t src = plan_.src_bases[at.tensor] + run.src_offset + at.offset;
    uint64_t dst = plan_.dst_bases[at.tensor] + run.dst_offset + at.offset;
    remote_[pieces_] = {reinterpret_cast<void*>(src), length};
    local_[pieces_] = {reinterpret_cast<void*>(dst), length};
    ++pieces_;
  }

  void advance(Position& at, uint64_t length) const {
    at.offset += length;
    if (at.offset < plan_.runs[at.run].length) return;
    at.offset = 0;
    if (++at.run < plan_.runs.size()) return;
    at.run = 0;
    ++at.tensor;
  }

  const CopyPlan& plan_;
  Position start_;
  size_t pieces_ = 0;
  std::array<iovec, kMaxPieces> local_;
  std::array<iovec, kMaxPieces> remote_;
};

[[noreturn]] void throw_copy_error(pid_t source, int error) {
  std::string why = errno_text(error);
  if (error == EFAULT) why = "a source or destination address is not mapped";
  if (error == ESRCH) why = "the process is gone";
  throw Error(Status::kFailed, "reading memory of process " + std::to_string(source) + ": " + why);
}

using SteadyClock = std::chrono::steady_clock;

std::atomic<uint64_t> g_copy_rate{0};

}  // namespace

void set_copy_rate(uint64_t bytes_per_second) { g_copy_rate = bytes_per_second; }

void CopyPace::add(uint64_t bytes) {
  copied_ += bytes;
  uint64_t rate = g_copy_rate.load(std::memory_order_relaxed);
  if (rate == 0) return;
  std::chrono::duration<double> needed(static_cast<double>(copied_) / static_cast<double>(rate));
  std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<SteadyClock::duration>(needed));
}

void copy_from_process(pid_t source, const CopyPlan& plan,
                       const std::function<void()>& checkpoint) {
  if (plan.runs.empty()) return;
  Batch batch(plan);
  CopyPace pace;
  while (batch.fill()) {
    checkpoint();
    ssize_t count = batch.read_from(source);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) throw_copy_error(source, count < 0 ? errno : EFAULT);
    batch.consume(static_cast<uint64_t>(count));
    pace.add(static_cast<uint64_t>(count));
  }
  checkpoint();
}

}  // namespace llmdd
