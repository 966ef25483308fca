// Where the engine's Unix sockets lie.
#pragma once

#include <cstddef>
#include <string>

namespace llmdd {

// TMPDIR, or /tmp if a socket whose path goes on for `rest` more bytes would not fit.
std::string socket_base(size_t rest);

}  // namespace llmdd
