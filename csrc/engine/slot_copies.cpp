#include "engine/slot_copies.h"

#include <unistd.h>

#include <algorithm>

#include "engine/copier.h"
#include "engine/copy_pieces.h"
#include "engine/stream_copy.h"

namespace llmdd {
namespace {

// Between two looks at what is on its way. A socket's buffers hold more.
constexpr uint64_t kStepBytes = 256 << 10;

// Absolute addresses: one base, 0.
CopyPlan plan_for(size_t num_pieces) {
  CopyPlan plan{{0}, {0}, {}};
  plan.runs.reserve(num_pieces);
  return plan;
}

// In the order of the runs: of two sources of one byte the last wins.
void copy_mapped(const CopyPlan& plan, const std::function<void()>& meanwhile) {
  std::vector<CopyPiece> step;
  uint64_t bytes = 0;
  auto copy_step = [&] {
    copy_pieces(step.data(), step.size());
    step.clear();
    bytes = 0;
    meanwhile();
  };
  for (const ByteRun& run : plan.runs) {
    for (uint64_t offset = 0; offset < run.length;) {
      uint64_t length = std::min(run.length - offset, kStepBytes - bytes);
      step.push_back({reinterpret_cast<uint8_t*>(run.dst_offset + offset),
                      reinterpret_cast<const uint8_t*>(run.src_offset + offset), length});
      offset += length;
      bytes += length;
      if (bytes == kStepBytes) copy_step();
    }
  }
  copy_step();
}

size_t copy(const CopyPlan& plan, CacheMemory memory, const std::function<void()>& meanwhile) {
  if (memory == CacheMemory::kMapped) {
    copy_mapped(plan, meanwhile);
  } else {
    copy_from_process(::getpid(), plan, meanwhile);
  }
  return total_bytes(plan);
}

}  // namespace

size_t gather(const std::vector<Fetch::Piece>& pieces, uint8_t* slot, CacheMemory memory,
              const std::function<void()>& meanwhile) {
  CopyPlan plan = plan_for(pieces.size());
  uint64_t to = reinterpret_cast<uint64_t>(slot);
  for (const Fetch::Piece& piece : pieces) {
    plan.runs.push_back({piece.addr, to, piece.length});
    to += piece.length;
  }
  return copy(plan, memory, meanwhile);
}

size_t scatter(const uint8_t* slot, const std::vector<Piece>& pieces, CacheMemory memory,
               const std::function<void()>& meanwhile) {
  CopyPlan plan = plan_for(pieces.size());
  uint64_t from = reinterpret_cast<uint64_t>(slot);
  for (const Piece& piece : pieces) {
    plan.runs.push_back({from, piece.dst, piece.length});
    from += piece.length;
  }
  return copy(plan, memory, meanwhile);
}

}  // namespace llmdd
