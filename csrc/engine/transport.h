// How the bytes of a peer are read.
#pragma once

#include <cstdint>
#include <string>

namespace llmdd {

enum class Transport : uint8_t {
  kAuto,  // from shared memory where that is possible, else by cross-memory attach
  kShm,   // refuses memory and peers with which shared memory is not possible
  kCma,   // cross-memory attach only
};

// Throws Error(kParamInvalid) naming the allowed values.
Transport parse_transport(const std::string& name);

const char* transport_name(Transport transport);

}  // namespace llmdd
