// Copies between a staging slot and the pieces of this process's caches that it stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/messages.h"
#include "engine/plan_chunks.h"

namespace llmdd {

// Both return how many bytes; they lie in the slot one piece behind the other. Throw Error(kFailed)
// for pieces that are not mapped in this process.
size_t gather(const std::vector<Fetch::Piece>& pieces, uint8_t* slot);
size_t scatter(const uint8_t* slot, const std::vector<Piece>& pieces);

}  // namespace llmdd
