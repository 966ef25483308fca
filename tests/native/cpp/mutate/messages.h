// Valid messages of every type, with random contents.
#pragma once

#include <vector>

#include "engine/messages.h"
#include "mutate/random.h"

namespace llmdd::test {

// Stands for a type where numbers are left out.
inline char letter_of(MessageType type) { return static_cast<char>('A' + static_cast<int>(type)); }

CacheRef random_ref(Random& random);
Push random_push(Random& random, const std::vector<uint64_t>& addrs);
// The payload of a message of this type, as a peer of this version would send it.
Bytes random_payload(MessageType type, Random& random);

}  // namespace llmdd::test
