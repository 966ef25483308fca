// Result codes of the LLM-DataDist API and the one exception type that carries them.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace llmdd {

// Values are those of LLMStatusCode, so a code crosses the wire and the binding unchanged.
enum class Status : uint32_t {
  kSuccess = 0,
  kFailed = 0xFFFFFFFF,
  kKvCacheNotExist = 0x5010B002,
  kParamInvalid = 0x5010B005,
  kNotYetLink = 0x5010B007,
  kAlreadyLink = 0x5010B008,
  kLinkFailed = 0x5010B009,
  kUnlinkFailed = 0x5010B00A,
  kKeyExists = 0x5010B015,  // has no name in Python
  kExistLink = 0x5010B018,
  kFeatureNotEnabled = 0x5010B019,
  kTimeout = 0x5010B01A,
  kOutOfMemory = 0x5010B01C,
};

// What failed, with the identifiers, both values and the next step: the text reaches the user.
class Error : public std::runtime_error {
 public:
  Error(Status status, const std::string& message) : std::runtime_error(message), status_(status) {}
  Status status() const { return status_; }

 private:
  Status status_;
};

}  // namespace llmdd
