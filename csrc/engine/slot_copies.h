// Copies between a staging slot and the pieces of this process's caches that it stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "engine/messages.h"
#include "engine/plan_chunks.h"

namespace llmdd {

// How this process may touch the memory of its caches.
enum class CacheMemory {
  kMapped,   // found to be mapped, and kept open by a CacheUse: it is loaded and stored
  kUnknown,  // only the kernel may, which answers instead of sending a signal
};

// Both return how many bytes; they lie in the slot one piece behind the other. `meanwhile` is
// called between parts of a copy, so that what else is on its way moves on. Throw Error(kFailed)
// for pieces that are not mapped in this process, and what `meanwhile` throws.
size_t gather(const std::vector<Fetch::Piece>& pieces, uint8_t* slot, CacheMemory memory,
              const std::function<void()>& meanwhile);
size_t scatter(const uint8_t* slot, const std::vector<Piece>& pieces, CacheMemory memory,
               const std::function<void()>& meanwhile);

}  // namespace llmdd
