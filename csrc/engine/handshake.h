// How two engines meet.
//
//   dialling side                TCP                 listening side
//   Hello        ------------------------------->    checks version, cluster ids, mode
//                <-------------------------------    Welcome (path of its Unix socket, token) or
//                Reject
//   checks the same
//                            Unix socket
//   both check the user id of the other's process (SO_PEERCRED)
//   Introduce    ------------------------------->    checks the token
//                <-------------------------------    Introduce
//   both read the other's nonce with process_vm_readv: "same host" means that this works
//   Verdict      ------------------------------->    files the link
//                <-------------------------------    Verdict
//
// When one side is set to NIXL, or both are set to find out and run on different hosts, the Welcome
// says so, and the TCP connection itself becomes the link:
//
//   Stage        ------------------------------->    checks the token, connects its NIXL agent
//                <-------------------------------    Stage
//   connects its NIXL agent
//   both write a few bytes into the other's staging memory: "reachable" means that this works
//   Verdict      ------------------------------->    files the link
//                <-------------------------------    Verdict
//
// There the kernel says nothing of the peer's user, and an agent's metadata can only be read by
// NIXL, which trusts it. So both sides prove first that they know the listening side's secret, if
// it has one: see docs/security.md.
//
// A dialling side that is set to find out, and finds no such socket on its own host (containers
// that share no directory), dials once more as one that is set to NIXL, if it has NIXL.
//
// Every wait is bounded by one deadline. What arrives is hostile until checked.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/random.h"
#include "common/socket_io.h"
#include "engine/messages.h"
#include "engine/nixl_links.h"
#include "engine/peer_memory.h"
#include "engine/peer_process.h"
#include "engine/prober.h"
#include "engine/transport.h"

namespace llmdd {

class CopyThreads;

// What one engine says of itself. Its address is the nonce's address: it does not move.
struct Identity {
  uint64_t cluster_id = 0;
  bool remote_access = false;
  Transport transport = Transport::kAuto;
  std::string link_secret;  // callers over NIXL must know it; empty: anybody may come
  std::shared_ptr<NixlLinks> nixl = std::make_shared<NixlLinks>("", 0);
  HostFacts host = read_host_facts();
  const Nonce nonce = random_nonce();
  CopyThreads* copy_threads = nullptr;  // help with copies from shared memory

  uint64_t nonce_addr() const { return reinterpret_cast<uint64_t>(nonce.data()); }
};

// A peer that has passed every check. Over NIXL its process is unknown.
struct Greeted {
  uint64_t cluster_id = 0;
  UniqueFd socket;
  PeerProcess process;
  std::unique_ptr<PeerMemory> memory;
  bool maps_shared = false;  // it takes offers of shared memory
};

struct DialTarget {
  uint64_t cluster_id = 0;
  std::string ip;
  uint16_t port = 0;
  std::string link_secret;  // the peer's; empty: it has none
};

// `confirm` is called before the message that makes the peer take the link, and throws to stop.
// Throws Error: kParamInvalid for another transfer mode, kAlreadyLink, else kLinkFailed.
Greeted greet_listener(const Identity& self, const Prober& prober, const DialTarget& target,
                       const WaitLimit& limit, const std::function<void()>& confirm);

// The same over a stream on which the peer listens in another way.
Greeted greet_over(const Identity& self, const Prober& prober, uint64_t cluster_id,
                   UniqueFd connection, const WaitLimit& limit,
                   const std::function<void()>& confirm, const std::string& link_secret = "");

// Tells the listening side that the two are linked already. Returns when it agrees; throws
// Error(kNotYetLink) when it knows of no such link, or not yet.
void greet_as_linked(const Identity& self, uint64_t cluster_id, UniqueFd connection,
                     const WaitLimit& limit);

// What the listening side decides. An Error that is thrown reaches the peer as the reason.
struct ListenerActions {
  // Puts the link into the table, with the final Verdict as its first message.
  std::function<void(Greeted)> file;
  // The peer says that the two are linked already; throws Error(kNotYetLink) to contradict.
  std::function<void(uint64_t cluster_id)> agree_linked;
  // The peer has said who it is. May be empty.
  std::function<void()> heard;
};

// Serves one accepted connection. `claimed_cluster_id` is set as soon as the peer has named itself.
// Throws Error; kAlreadyLink also when both agreed that they are linked.
void greet_dialer(const Identity& self, const Prober& prober, UniqueFd tcp, int stop_fd,
                  std::optional<uint64_t>& claimed_cluster_id, const ListenerActions& actions);

}  // namespace llmdd
