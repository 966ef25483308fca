#include "common/hmac.h"

#include <algorithm>
#include <cstddef>

namespace llmdd {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kBlockBytes = 64;

constexpr std::array<uint32_t, 64> kRoundConstants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t value, unsigned by) { return value >> by | value << (32 - by); }

class Sha256 {
 public:
  void add(const Bytes& bytes) {
    for (uint8_t byte : bytes) add(byte);
  }

  Digest finish() {
    uint64_t bits = 8 * length_;
    add(uint8_t{0x80});
    while (length_ % kBlockBytes != kBlockBytes - 8) add(uint8_t{0});
    for (int shift = 56; shift >= 0; shift -= 8) add(static_cast<uint8_t>(bits >> shift));
    Digest digest;
    for (size_t i = 0; i < digest.size(); ++i) {
      digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
    }
    return digest;
  }

 private:
  void add(uint8_t byte) {
    block_[length_++ % kBlockBytes] = byte;
    if (length_ % kBlockBytes == 0) mix();
  }

  std::array<uint32_t, 64> schedule() const {
    std::array<uint32_t, 64> words{};
    for (size_t i = 0; i < kBlockBytes; ++i) {
      words[i / 4] |= uint32_t{block_[i]} << (24 - 8 * (i % 4));
    }
    for (size_t i = 16; i < words.size(); ++i) {
      uint32_t a = words[i - 15];
      uint32_t b = words[i - 2];
      words[i] = words[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + words[i - 7] +
                 (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
    }
    return words;
  }

  void mix() {
    std::array<uint32_t, 64> words = schedule();
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < words.size(); ++i) {
      uint32_t choice = (e & f) ^ (~e & g);
      uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      uint32_t first = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice +
                       kRoundConstants[i] + words[i];
      uint32_t second = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
      h = g;
      g = f;
      f = e;
      e = d + first;
      d = c;
      c = b;
      b = a;
      a = first + second;
    }
    std::array<uint32_t, 8> mixed = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < state_.size(); ++i) state_[i] += mixed[i];
  }

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, kBlockBytes> block_{};
  uint64_t length_ = 0;
};

Digest sha256(const Bytes& first, const Bytes& second) {
  Sha256 hash;
  hash.add(first);
  hash.add(second);
  return hash.finish();
}

Bytes to_bytes(const Digest& digest) { return {digest.begin(), digest.end()}; }

}  // namespace

Digest hmac_sha256(const std::string& key, const Bytes& message) {
  Bytes padded(key.begin(), key.end());
  if (padded.size() > kBlockBytes) padded = to_bytes(sha256(padded, {}));
  padded.resize(kBlockBytes);
  auto masked = [&padded](uint8_t mask) {
    Bytes bytes = padded;
    for (uint8_t& byte : bytes) byte ^= mask;
    return bytes;
  };
  return sha256(masked(0x5c), to_bytes(sha256(masked(0x36), message)));
}

bool same_digest(const Digest& a, const Digest& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace llmdd
