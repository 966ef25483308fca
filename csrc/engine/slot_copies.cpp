#include "engine/slot_copies.h"

#include <unistd.h>

#include "engine/copier.h"

namespace llmdd {

size_t gather(const std::vector<Fetch::Piece>& pieces, uint8_t* slot) {
  CopyPlan plan{{0}, {reinterpret_cast<uint64_t>(slot)}, {}};
  uint64_t bytes = 0;
  for (const Fetch::Piece& piece : pieces) {
    plan.runs.push_back({piece.addr, bytes, piece.length});
    bytes += piece.length;
  }
  copy_from_process(::getpid(), plan, [] {});
  return bytes;
}

size_t scatter(const uint8_t* slot, const std::vector<Piece>& pieces) {
  CopyPlan plan{{reinterpret_cast<uint64_t>(slot)}, {0}, {}};
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) {
    plan.runs.push_back({bytes, piece.dst, piece.length});
    bytes += piece.length;
  }
  copy_from_process(::getpid(), plan, [] {});
  return bytes;
}

}  // namespace llmdd
