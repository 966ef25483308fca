// Bytes nobody can guess, for nonces and rendezvous tokens.
#pragma once

#include <sys/random.h>

#include <array>
#include <cstdint>

#include "common/status.h"

namespace llmdd {

using Nonce = std::array<uint8_t, 16>;

inline Nonce random_nonce() {
  Nonce nonce{};
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw Error(Status::kFailed, "getrandom failed");
  }
  return nonce;
}

}  // namespace llmdd
