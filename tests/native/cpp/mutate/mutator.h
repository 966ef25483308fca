// Changes valid bytes a little.
#pragma once

#include "engine/wire.h"
#include "mutate/random.h"

namespace llmdd::test {

// One to four changes: bits, bytes, numbers of any width, cuts, insertions, repeated pieces.
void mutate(Bytes& bytes, Random& random);
// Overwrites one number; the length stays.
void mutate_number(Bytes& bytes, Random& random);

}  // namespace llmdd::test
