#include "engine/plan_chunks.h"

#include <algorithm>

namespace llmdd {

std::vector<Piece> PlanChunks::next() {
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
  while (!empty() && bytes < max_bytes_ && pieces.size() < max_pieces_) {
    const ByteRun& run = plan_.runs[run_];
    uint64_t length = std::min(run.length - offset_, max_bytes_ - bytes);
    pieces.push_back({plan_.src_bases[tensor_] + run.src_offset + offset_,
                      plan_.dst_bases[tensor_] + run.dst_offset + offset_, length});
    bytes += length;
    offset_ += length;
    skip_ended();
  }
  return pieces;
}

void PlanChunks::skip_ended() {
  while (!empty() && offset_ == plan_.runs[run_].length) {
    offset_ = 0;
    if (++run_ < plan_.runs.size()) continue;
    run_ = 0;
    ++tensor_;
  }
}

}  // namespace llmdd
