// Copies of many pieces of memory, as fast as this processor can.
#pragma once

#include <cstddef>
#include <cstdint>

namespace llmdd {

struct CopyPiece {
  uint8_t* dst = nullptr;
  const uint8_t* src = nullptr;
  uint64_t length = 0;
};

// One after the other, with memcpy(3).
void copy_pieces(const CopyPiece* pieces, size_t count);

// The same around the caches, for what is larger than they are: stores that do not read the line
// first, and the next page of source and destination looked up ahead, also that of the next piece.
// Where the processor has no AVX2, as copy_pieces.
void stream_pieces(const CopyPiece* pieces, size_t count);

}  // namespace llmdd
