// What the mutation driver tries. Each takes one seed, checks what must hold whatever the input is,
// and says in a word or a sentence how the input was received.
#pragma once

#include <cstdint>
#include <string>

#include "mutate/random.h"

namespace llmdd::test {

// Messages: refused, or the same after another round of encoding.
std::string try_message(Random& random);
// A stream of frames in pieces of any size, on a link that is served.
std::string try_stream(Random& random);
// Requests of a linked peer: nothing outside registered memory is written.
std::string try_request(Random& random);
// Both sides of the handshake, up to the point where a real peer is needed.
std::string try_handshake(Random& random);
// Block lists, cuts of rows and layer ranges against a slow way to do the same.
std::string try_runs(Random& random);
// Descriptors, keys and lookups of the cache table.
std::string try_cache_table(Random& random);
// Reservations that are opened, used and closed.
std::string try_reservations(Random& random);

}  // namespace llmdd::test
