#include "engine/transport_choice.h"

#include "common/status.h"

namespace llmdd {

bool needs_nixl(const TransportFacts& local, const TransportFacts& peer) {
  auto is = [](const TransportFacts& side, Transport transport) {
    return side.transport == transport;
  };
  bool both_auto = is(local, Transport::kAuto) && is(peer, Transport::kAuto);
  if (both_auto) return local.boot_id != peer.boot_id;
  if (!is(local, Transport::kNixl) && !is(peer, Transport::kNixl)) return false;
  for (const TransportFacts* side : {&local, &peer}) {
    if (is(*side, Transport::kNixl) || is(*side, Transport::kAuto)) continue;
    throw Error(Status::kParamInvalid, std::string("transport differs: local ") +
                                           transport_name(local.transport) + ", peer has " +
                                           transport_name(peer.transport) +
                                           "; set auto, or the same value, on both sides");
  }
  return true;
}

std::string missing_nixl_sentence(const TransportFacts& local, const TransportFacts& peer) {
  std::string why = local.boot_id != peer.boot_id ? "the peer runs on another host"
                                                  : "the peer's transport is nixl";
  return why + ", and NIXL is not installed here; pip install 'nixl>=1.5' on both sides";
}

}  // namespace llmdd
