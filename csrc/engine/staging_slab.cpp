#include "engine/staging_slab.h"

#include <sys/mman.h>

#include <string>

#include "common/status.h"

namespace llmdd {

StagingSlab::StagingSlab(size_t num_slots) : num_slots_(num_slots) {
  void* memory = ::mmap(nullptr, size(), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(Status::kOutOfMemory, "no memory for " + std::to_string(num_slots) +
                                          " staging slots of " + std::to_string(kSlotBytes) +
                                          " bytes; lower staging_mib or the number of links");
  }
  data_ = static_cast<uint8_t*>(memory);
  // Memory that a network card has pinned must not become a child's copy.
  ::madvise(memory, size(), MADV_DONTFORK);
  for (size_t slot = num_slots; slot > 0; --slot) free_.push_back(slot - 1);
}

StagingSlab::~StagingSlab() { ::munmap(data_, size()); }

std::optional<size_t> StagingSlab::acquire() {
  std::lock_guard lock(mutex_);
  if (free_.empty()) return std::nullopt;
  size_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void StagingSlab::release(size_t slot) {
  std::lock_guard lock(mutex_);
  free_.push_back(slot);
}

}  // namespace llmdd
