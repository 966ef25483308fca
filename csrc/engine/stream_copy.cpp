#include "engine/stream_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmdd {

void copy_pieces(const CopyPiece* pieces, size_t count) {
  for (size_t i = 0; i < count; ++i) std::memcpy(pieces[i].dst, pieces[i].src, pieces[i].length);
}

#if defined(__x86_64__)
namespace {

constexpr size_t kVector = 32;
constexpr size_t kStep = 4 * kVector;
// The processor's own look-ahead ends at the end of a page.
constexpr size_t kPage = 4096;
// Below it, finding the destination's alignment costs more than it saves.
constexpr size_t kMinStreamed = 2048;

// The address `ahead` bytes further in the copy: in this piece or the next.
template <typename Byte>
const Byte* ahead_of(const Byte* here, size_t left, const Byte* next) {
  return kPage < left ? here + kPage : next + (kPage - left);
}

__attribute__((target("avx2"))) void stream_piece(const CopyPiece& piece, const CopyPiece& next) {
  uint8_t* dst = piece.dst;
  const uint8_t* src = piece.src;
  size_t left = piece.length;
  size_t head = std::min(left, (kVector - reinterpret_cast<uintptr_t>(dst)) % kVector);
  std::memcpy(dst, src, head);
  dst += head, src += head, left -= head;
  for (size_t steps = 0; left >= kStep; ++steps) {
    const uint8_t* ahead = ahead_of(src, left, next.src);
    _mm_prefetch(ahead, _MM_HINT_NTA);
    _mm_prefetch(ahead + kStep / 2, _MM_HINT_NTA);
    if (steps % (kPage / kStep) == 0) {
      _mm_prefetch(ahead_of<uint8_t>(dst, left, next.dst), _MM_HINT_T0);
    }
    auto* from = reinterpret_cast<const __m256i*>(src);
    auto* to = reinterpret_cast<__m256i*>(dst);
    __m256i first = _mm256_loadu_si256(from);
    __m256i second = _mm256_loadu_si256(from + 1);
    __m256i third = _mm256_loadu_si256(from + 2);
    __m256i fourth = _mm256_loadu_si256(from + 3);
    _mm256_stream_si256(to, first);
    _mm256_stream_si256(to + 1, second);
    _mm256_stream_si256(to + 2, third);
    _mm256_stream_si256(to + 3, fourth);
    dst += kStep, src += kStep, left -= kStep;
  }
  std::memcpy(dst, src, left);
}

void stream_all(const CopyPiece* pieces, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (pieces[i].length < kMinStreamed) {
      copy_pieces(pieces + i, 1);
    } else {
      stream_piece(pieces[i], pieces[i + 1 < count ? i + 1 : i]);
    }
  }
  _mm_sfence();  // before anyone is told that the bytes are there
}

}  // namespace

void stream_pieces(const CopyPiece* pieces, size_t count) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return stream_all(pieces, count);
  copy_pieces(pieces, count);
}
#else
void stream_pieces(const CopyPiece* pieces, size_t count) { copy_pieces(pieces, count); }
#endif

}  // namespace llmdd
