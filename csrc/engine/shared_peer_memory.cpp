#include "engine/shared_peer_memory.h"

#include <algorithm>
#include <optional>
#include <string>

#include "common/log.h"
#include "engine/copy_pace.h"
#include "engine/copy_pieces.h"
#include "engine/messages.h"
#include "engine/stream_copy.h"

namespace llmdd {
namespace {

// Between two looks at the plan; checkpoints come more often.
constexpr uint64_t kBatchBytes = 64ULL << 20;
constexpr size_t kBatchPieces = 16 << 10;
// As in copier.h, when a copy is slowed down.
constexpr uint64_t kSlowBatchBytes = 32ULL << 20;
constexpr size_t kSlowBatchPieces = 1024;
// Waking helpers costs about as much as copying this.
constexpr uint64_t kShareBytes = 4ULL << 20;
// What is larger than this would push everything else out of the caches, and be out of them itself
// before it is used.
constexpr uint64_t kStreamBytes = 16ULL << 20;
// On the calling thread, between two checkpoints: up to four threads copy as much.
constexpr uint64_t kCheckBytes = 8ULL << 20;

class MappedCopy {
 public:
  MappedCopy(pid_t pid, CopyThreads* threads, const CopyPlan& plan,
             const std::function<void()>& checkpoint)
      : pid_(pid), plan_(plan), checkpoint_(checkpoint), slow_(copies_are_slowed()) {
    uint64_t total = total_bytes(plan);
    streams_ = total >= kStreamBytes;
    bool large = !slow_ && total >= kShareBytes;
    if (large && threads != nullptr && threads->width() > 1 && once()) threads_ = threads;
  }

  void run(const PeerView& view) {
    PieceCutter cutter(plan_, view);
    CopyPace pace;
    while (cutter.next(batch_, slow_ ? kSlowBatchBytes : kBatchBytes,
                       slow_ ? kSlowBatchPieces : kBatchPieces)) {
      // Of two sources of one byte the last wins, so the order must be kept.
      if (!batch_.rest.runs.empty() && !once()) return copy_from_process(pid_, plan_, checkpoint_);
      copy_mapped();
      if (!batch_.rest.runs.empty()) copy_from_process(pid_, batch_.rest, checkpoint_);
      pace.keep(batch_.bytes);
    }
    checkpoint_();
  }

 private:
  bool once() {
    if (!once_) once_ = writes_once(plan_);
    return *once_;
  }

  void copy_unit(size_t unit) const {
    const CopyPiece* first = batch_.pieces.data() + batch_.units[unit];
    size_t count = batch_.end_of(unit) - batch_.units[unit];
    (streams_ ? stream_pieces : copy_pieces)(first, count);
  }

  void copy_mapped() {
    uint64_t unchecked = kCheckBytes;
    auto before = [&] {
      if (unchecked >= kCheckBytes) {
        checkpoint_();
        unchecked = 0;
      }
      unchecked += batch_.bytes / std::max<size_t>(batch_.units.size(), 1);
    };
    if (threads_ != nullptr) {
      return threads_->run(batch_.units.size(), [this](size_t unit) { copy_unit(unit); }, before);
    }
    for (size_t unit = 0; unit < batch_.units.size(); ++unit) {
      before();
      copy_unit(unit);
    }
  }

  const pid_t pid_;
  const CopyPlan& plan_;
  const std::function<void()>& checkpoint_;
  const bool slow_;
  bool streams_ = false;
  CopyThreads* threads_ = nullptr;
  std::optional<bool> once_;
  PieceBatch batch_;
};

}  // namespace

void SharedPeerMemory::copy(const CopyPlan& plan, const std::function<void()>& checkpoint) {
  std::string failure = pages_.take_failure();
  if (!failure.empty()) {
    log(LogLevel::kWarning, "process " + std::to_string(pid_) +
                                ": its shared memory cannot be mapped, it is copied by "
                                "cross-memory attach: " +
                                failure);
  }
  std::shared_ptr<const PeerView> view = pages_.view();
  if (view->empty() || !plan.dst_mapped) return copy_from_process(pid_, plan, checkpoint);
  MappedCopy(pid_, threads_, plan, checkpoint).run(*view);
}

void SharedPeerMemory::notice(const Frame& frame, UniqueFd fd) {
  if (frame.type == MessageType::kWithdraw) {
    return pages_.remove(Withdraw::decode(frame.payload).file_id);
  }
  Share share = Share::decode(frame.payload);
  pages_.add(share.file_id, share.size, share.ranges, fd);
}

}  // namespace llmdd
