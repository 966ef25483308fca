#include "engine/nixl_links.h"

#include "engine/nixl_memory.h"

namespace llmdd {

std::unique_ptr<NixlMemory> NixlLinks::make() {
  std::lock_guard lock(mutex_);
  if (!library_) library_ = NixlLibrary::load(library_path_);
  return std::make_unique<NixlMemory>(library_, slots_per_link_);
}

}  // namespace llmdd
