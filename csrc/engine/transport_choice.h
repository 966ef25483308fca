// Which transport a link gets, from what both sides are set to.
#pragma once

#include <string>

#include "engine/messages.h"

namespace llmdd {

struct TransportFacts {
  Transport transport = Transport::kAuto;
  std::string boot_id;  // differs between hosts
};

// True: NIXL; false: by the means of one host. Throws Error(kParamInvalid) with both values when
// one side insists on NIXL and the other on something else.
bool needs_nixl(const TransportFacts& local, const TransportFacts& peer);

// What a side without NIXL says when a link needs it.
std::string missing_nixl_sentence(const TransportFacts& local, const TransportFacts& peer);

}  // namespace llmdd
