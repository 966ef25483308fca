// Makes this process's ends of links over NIXL; NIXL is loaded with the first one.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "engine/nixl_library.h"

namespace llmdd {

class NixlMemory;

class NixlLinks {
 public:
  // An empty path: NIXL is not installed.
  NixlLinks(std::string library_path, size_t slots_per_link)
      : library_path_(std::move(library_path)), slots_per_link_(slots_per_link) {}

  bool installed() const { return !library_path_.empty(); }
  // Throws Error(kFeatureNotEnabled) for a library that cannot be loaded, Error(kFailed) if NIXL
  // fails.
  std::unique_ptr<NixlMemory> make();

 private:
  const std::string library_path_;
  const size_t slots_per_link_;
  std::mutex mutex_;
  std::shared_ptr<const NixlLibrary> library_;
};

}  // namespace llmdd
