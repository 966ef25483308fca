// How the bytes of a link move.
#pragma once

#include <cstdint>

namespace llmdd {

// The numbers cross the wire.
enum class Transport : uint8_t {
  kAuto = 0,  // within one host by the host's own means, else by NIXL
  kShm = 1,
  kCma = 2,
  kNixl = 3,
};

constexpr uint8_t kNumTransports = 4;

constexpr const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kShm:
      return "shm";
    case Transport::kCma:
      return "cma";
    case Transport::kNixl:
      return "nixl";
    default:
      return "auto";
  }
}

}  // namespace llmdd
