// HMAC-SHA256 (RFC 2104, FIPS 180-4), for the proof that both ends of a link know one secret.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace llmdd {

using Digest = std::array<uint8_t, 32>;

Digest hmac_sha256(const std::string& key, const std::vector<uint8_t>& message);

// In a time that does not depend on where they differ.
bool same_digest(const Digest& a, const Digest& b);

}  // namespace llmdd
