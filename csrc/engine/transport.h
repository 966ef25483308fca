// How the bytes of a peer are read.
#pragma once

#include <cstdint>
#include <string>

namespace llmdd {

// The numbers cross the wire.
enum class Transport : uint8_t {
  kAuto = 0,  // by the means of one host where both sides are on it, else by NIXL
  kShm = 1,   // shared memory; refuses memory and peers with which it is not possible
  kCma = 2,   // cross-memory attach only
  kNixl = 3,  // NIXL only, also within a host
};

// Throws Error(kParamInvalid) naming the allowed values.
Transport parse_transport(const std::string& name);

const char* transport_name(Transport transport);

// Whether this is a transport's number.
bool is_transport(uint8_t number);

}  // namespace llmdd
