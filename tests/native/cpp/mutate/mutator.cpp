#include "mutate/mutator.h"

#include <algorithm>

namespace llmdd::test {
namespace {

using Position = Bytes::difference_type;

Position place(const Bytes& bytes, Random& random) {
  return static_cast<Position>(random.below(bytes.size() + 1));
}

void flip_bit(Bytes& bytes, Random& random) {
  bytes[random.below(bytes.size())] ^= static_cast<uint8_t>(1U << random.below(8));
}

void overwrite_number(Bytes& bytes, Random& random) {
  size_t width = size_t{1} << random.below(4);
  size_t start = random.below(bytes.size());
  uint64_t value = random.awkward();
  for (size_t i = 0; i < width && start + i < bytes.size(); ++i) {
    bytes[start + i] = static_cast<uint8_t>(value >> (8 * i));
  }
}

void cut(Bytes& bytes, Random& random) { bytes.resize(random.below(bytes.size())); }

void insert(Bytes& bytes, Random& random) {
  Bytes added(random.between(1, 40));
  for (uint8_t& byte : added) byte = static_cast<uint8_t>(random.one_in(2) ? 0 : random.next());
  bytes.insert(bytes.begin() + place(bytes, random), added.begin(), added.end());
}

void erase(Bytes& bytes, Random& random) {
  Position first = place(bytes, random);
  Position last = place(bytes, random);
  bytes.erase(bytes.begin() + std::min(first, last), bytes.begin() + std::max(first, last));
}

void repeat(Bytes& bytes, Random& random) {
  Position first = place(bytes, random);
  Position last = place(bytes, random);
  Bytes piece(bytes.begin() + std::min(first, last), bytes.begin() + std::max(first, last));
  bytes.insert(bytes.begin() + place(bytes, random), piece.begin(), piece.end());
}

void mutate_once(Bytes& bytes, Random& random) {
  if (bytes.empty()) return insert(bytes, random);
  switch (random.below(10)) {
    case 0:
      return cut(bytes, random);
    case 1:
      return insert(bytes, random);
    case 2:
      return erase(bytes, random);
    case 3:
      return repeat(bytes, random);
    case 4:
    case 5:
      return flip_bit(bytes, random);
    default:
      return overwrite_number(bytes, random);
  }
}

}  // namespace

void mutate_number(Bytes& bytes, Random& random) {
  if (!bytes.empty()) overwrite_number(bytes, random);
}

void mutate(Bytes& bytes, Random& random) {
  for (uint64_t changes = random.between(1, 4); changes > 0; --changes) mutate_once(bytes, random);
}

}  // namespace llmdd::test
