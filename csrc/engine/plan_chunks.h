// Cuts a copy into chunks that fit a staging slot.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/copier.h"

namespace llmdd {

// Consecutive bytes from an address of the source's process to one of the destination's.
struct Piece {
  uint64_t src = 0;
  uint64_t dst = 0;
  uint64_t length = 0;
};

class PlanChunks {
 public:
  PlanChunks(const CopyPlan& plan, uint64_t max_bytes, size_t max_pieces)
      : plan_(plan), max_bytes_(max_bytes), max_pieces_(max_pieces) {
    skip_ended();
  }

  bool empty() const { return tensor_ == plan_.src_bases.size() || plan_.runs.empty(); }
  // The next pieces in the plan's order; no chunk is empty.
  std::vector<Piece> next();

 private:
  // From a run that has no bytes left to one that has.
  void skip_ended();

  const CopyPlan& plan_;
  const uint64_t max_bytes_;
  const size_t max_pieces_;
  size_t tensor_ = 0;
  size_t run_ = 0;
  uint64_t offset_ = 0;  // into the run
};

}  // namespace llmdd
