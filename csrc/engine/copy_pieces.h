// A copy plan cut into pieces: those whose source is mapped here, and the rest.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/copier.h"
#include "engine/stream_copy.h"
#include "shm/peer_pages.h"

namespace llmdd {

// A bounded part of a plan. Pieces are grouped in units of about half a MiB, for threads to share.
struct PieceBatch {
  std::vector<CopyPiece> pieces;
  std::vector<size_t> units;  // index of the first piece of each
  CopyPlan rest;              // absolute addresses: one base, 0

  size_t end_of(size_t unit) const {
    return unit + 1 < units.size() ? units[unit + 1] : pieces.size();
  }
  uint64_t bytes = 0;  // of all pieces
};

class PieceCutter {
 public:
  // Both outlive this.
  PieceCutter(const CopyPlan& plan, const PeerView& view) : plan_(plan), view_(view) {}

  // The next part, of at most this many bytes and pieces; false when the plan is done.
  bool next(PieceBatch& batch, uint64_t max_bytes, size_t max_pieces);

 private:
  void cut(PieceBatch& batch, uint64_t length);

  const CopyPlan& plan_;
  const PeerView& view_;
  const PeerRange* range_ = nullptr;  // where the last piece was
  size_t tensor_ = 0;
  size_t run_ = 0;
  uint64_t offset_ = 0;
  uint64_t unit_bytes_ = 0;
};

uint64_t total_bytes(const CopyPlan& plan);

// Whether no byte of the destination is written twice. False also where that is hard to tell.
bool writes_once(const CopyPlan& plan);

}  // namespace llmdd
