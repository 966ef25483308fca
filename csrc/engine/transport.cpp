#include "engine/transport.h"

#include <algorithm>

#include "common/status.h"

namespace llmdd {
namespace {

constexpr Transport kTransports[] = {Transport::kAuto, Transport::kShm, Transport::kCma,
                                     Transport::kNixl};

}  // namespace

const char* transport_name(Transport transport) {
  switch (transport) {
    case Transport::kShm:
      return "shm";
    case Transport::kCma:
      return "cma";
    case Transport::kNixl:
      return "nixl";
    case Transport::kAuto:
      break;
  }
  return "auto";
}

Transport parse_transport(const std::string& name) {
  std::string allowed;
  for (Transport transport : kTransports) {
    if (name == transport_name(transport)) return transport;
    allowed += std::string(allowed.empty() ? "" : ", ") + transport_name(transport);
  }
  throw Error(Status::kParamInvalid, "transport is '" + name + "', it must be one of: " + allowed);
}

bool is_transport(uint8_t number) {
  return std::any_of(std::begin(kTransports), std::end(kTransports),
                     [number](Transport known) { return static_cast<uint8_t>(known) == number; });
}

}  // namespace llmdd
