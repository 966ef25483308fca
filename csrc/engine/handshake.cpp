#include "engine/handshake.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/log.h"
#include "engine/handshake_io.h"
#include "engine/nixl_memory.h"
#include "engine/rendezvous.h"
#include "engine/shared_peer_memory.h"
#include "engine/transport_choice.h"

namespace llmdd {
namespace {

constexpr int64_t kHelloTimeoutMs = 3000;
constexpr uint32_t kMaxHandshakeMs = 60000;

const char* mode_name(bool remote_access) { return remote_access ? "True" : "False"; }

void check_mode(bool local, bool peer) {
  if (local == peer) return;
  throw Error(Status::kParamInvalid, std::string("enable_remote_cache_accessible differs: local ") +
                                         mode_name(local) + ", peer has " + mode_name(peer) +
                                         "; set the same value on both sides");
}

void check_id(const char* what, uint64_t wanted, uint64_t actual) {
  if (wanted == actual) return;
  throw Error(Status::kLinkFailed, std::string(what) + ": wanted " + std::to_string(wanted) +
                                       ", it is " + std::to_string(actual));
}

std::string unreachable_sentence(const Identity& self, const Welcome& welcome, const char* why) {
  std::string socket = "socket " + welcome.socket_path + " cannot be reached (" + why + "): ";
  if (self.host.boot_id != welcome.host.boot_id) {
    return socket +
           "the peer runs on another host; set transport to nixl, or to auto, on both sides";
  }
  if (::access(welcome.socket_path.c_str(), F_OK) != 0 && errno == EACCES) {
    return socket + "it belongs to another user; run both processes as the same user";
  }
  return socket +
         "the processes share a kernel but not this directory; let both containers mount one "
         "directory and name it in TMPDIR";
}

// The two share a kernel but no directory, which is all that NIXL does without.
class OutOfReach : public Error {
 public:
  explicit OutOfReach(const std::string& text) : Error(Status::kLinkFailed, text) {}
};

bool may_take_nixl(const Identity& self, const Welcome& welcome) {
  return self.transport == Transport::kAuto && welcome.transport == Transport::kAuto &&
         self.nixl->installed() && self.host.boot_id == welcome.host.boot_id;
}

UniqueFd dial_peer_socket(const Identity& self, const Welcome& welcome, const WaitLimit& limit) {
  try {
    return dial_unix(welcome.socket_path, limit);
  } catch (const Error& error) {
    std::string sentence = unreachable_sentence(self, welcome, error.what());
    bool missing = ::access(welcome.socket_path.c_str(), F_OK) != 0 && errno == ENOENT;
    if (missing && may_take_nixl(self, welcome)) throw OutOfReach(sentence);
    throw Error(Status::kLinkFailed, sentence);
  }
}

Introduce introduction(const Identity& self, const Nonce& token) {
  return {token, self.nonce, self.nonce_addr(), self.transport != Transport::kCma};
}

void check_transport(const Identity& self, const Introduce& peer) {
  if (self.transport != Transport::kShm || peer.maps_shared) return;
  throw Error(Status::kParamInvalid,
              "transport differs: local shm, peer has cma; set the same on both sides, or auto");
}

Greeted greeted(const Identity& self, uint64_t cluster_id, UniqueFd socket, PeerProcess process,
                const Introduce& peer) {
  std::unique_ptr<PeerMemory> memory;
  if (self.transport == Transport::kCma) {
    memory = std::make_unique<ProcessMemory>(process.pid);
  } else {
    memory = std::make_unique<SharedPeerMemory>(process.pid, self.copy_threads);
  }
  return {cluster_id, std::move(socket), std::move(process), std::move(memory), peer.maps_shared};
}

bool needs_nixl_with(const Identity& self, Transport transport, const HostFacts& host) {
  TransportFacts local{self.transport, self.host.boot_id};
  TransportFacts peer{transport, host.boot_id};
  if (!needs_nixl(local, peer)) return false;
  if (!self.nixl->installed()) {
    throw Error(Status::kLinkFailed, missing_nixl_sentence(local, peer));
  }
  return true;
}

// What the dialling side's caller asks for.
struct DialTerms {
  uint64_t cluster_id = 0;
  const std::string& link_secret;
  const std::function<void()>& confirm;
};

void check_proof(const Stage& peer, const std::string& secret, const Digest* answered) {
  if (secret.empty() || same_digest(peer.proof, peer.prove(secret, answered))) return;
  throw Error(Status::kLinkFailed,
              "the peer does not know the secret of this link; link with the one that the control "
              "channel names");
}

// The dialling side's half over TCP alone.
Greeted stage_with_listener(const Identity& self, const Nonce& token, const DialTerms& terms,
                            UniqueFd& connection, const WaitLimit& limit) {
  int fd = connection.get();
  std::unique_ptr<NixlMemory> memory = self.nixl->make();
  Stage own = memory->stage(token);
  own.proof = own.prove(terms.link_secret);
  send_or_learn(fd, MessageType::kStage, own.encode(), limit);
  Stage peer = Stage::decode(expect(fd, MessageType::kStage, limit).payload);
  check_proof(peer, terms.link_secret, &own.proof);
  memory->connect(peer);
  memory->probe(limit, [] { return true; });
  send_verdict(fd, limit, terms.confirm);
  // The peer may still be trying.
  memory->progress_until([fd] { return readable(fd); }, limit);
  read_verdict(fd, limit);
  prepare_connection(fd);
  return {terms.cluster_id, std::move(connection), {}, std::move(memory)};
}

Welcome welcome_of(const Identity& self) {
  return {self.cluster_id, self.remote_access, self.host, self.transport, "", random_nonce()};
}

Welcome exchange_hello(const Identity& self, uint64_t cluster_id, int tcp, const WaitLimit& limit) {
  Hello hello{self.cluster_id,    cluster_id,
              self.remote_access, static_cast<uint32_t>(limit.deadline.remaining_ms()),
              self.host,          self.transport};
  send_frame(tcp, MessageType::kHello, hello.encode(), limit);
  Welcome welcome = Welcome::decode(expect(tcp, MessageType::kWelcome, limit).payload);
  check_id("the peer at this address has another cluster id", cluster_id, welcome.cluster_id);
  check_mode(self.remote_access, welcome.remote_access);
  return welcome;
}

Greeted greet_listener_checked(const Identity& self, const Prober& prober, const DialTerms& terms,
                               UniqueFd& connection, const WaitLimit& limit) {
  Welcome welcome = exchange_hello(self, terms.cluster_id, connection.get(), limit);
  if (needs_nixl_with(self, welcome.transport, welcome.host)) {
    return stage_with_listener(self, welcome.token, terms, connection, limit);
  }
  UniqueFd socket = dial_peer_socket(self, welcome, limit);
  PeerProcess process = identify_peer(socket.get());
  send_or_learn(socket.get(), MessageType::kIntroduce, introduction(self, welcome.token).encode(),
                limit);
  Introduce peer = Introduce::decode(expect(socket.get(), MessageType::kIntroduce, limit).payload);
  or_reject(socket.get(), limit, [&] {
    check_transport(self, peer);
    prober.probe(process.pid, peer.nonce_addr, peer.nonce);
    send_verdict(socket.get(), limit, terms.confirm);
    read_verdict(socket.get(), limit);
  });
  return greeted(self, terms.cluster_id, std::move(socket), std::move(process), peer);
}

// Waits for the dialling side on the Unix socket, and for its reason on TCP if it gives up.
UniqueFd await_dialer(const Rendezvous& rendezvous, int tcp, const WaitLimit& limit) {
  while (true) {
    pollfd fds[3] = {{rendezvous.fd(), POLLIN, 0}, {tcp, POLLIN, 0}, {limit.stop_fd, POLLIN, 0}};
    ::poll(fds, 3, limit.deadline.remaining_ms());
    if (fds[2].revents != 0) throw Error(Status::kFailed, "the engine is being finalized");
    if (fds[0].revents != 0) return accept_one(rendezvous.fd());
    if (fds[1].revents != 0) expect(tcp, MessageType::kReject, limit);
    if (limit.deadline.passed()) throw Error(Status::kTimeout, "the peer did not come in time");
  }
}

struct Visitor {
  UniqueFd socket;
  PeerProcess process;
  Introduce introduce;
};

Visitor receive_visitor(const Rendezvous& rendezvous, const Nonce& token, int tcp,
                        const WaitLimit& limit) {
  UniqueFd socket = await_dialer(rendezvous, tcp, limit);
  if (!socket) throw Error(Status::kLinkFailed, "the peer left before it was accepted");
  return or_reject(socket.get(), limit, [&]() -> Visitor {
    PeerProcess process = identify_peer(socket.get());
    Introduce introduce =
        Introduce::decode(expect(socket.get(), MessageType::kIntroduce, limit).payload);
    if (introduce.token != token) {
      throw Error(Status::kLinkFailed, "another process came to the socket of this handshake");
    }
    return {std::move(socket), std::move(process), introduce};
  });
}

Hello receive_hello(const Identity& self, int tcp, int stop_fd,
                    std::optional<uint64_t>& claimed_cluster_id) {
  WaitLimit limit{Deadline::after_ms(kHelloTimeoutMs), stop_fd};
  return or_reject(tcp, limit, [&] {
    Hello hello = Hello::decode(expect(tcp, MessageType::kHello, limit).payload);
    claimed_cluster_id = hello.cluster_id;
    check_id("another cluster id listens here", hello.wanted_cluster_id, self.cluster_id);
    if (hello.cluster_id == self.cluster_id) {
      throw Error(Status::kParamInvalid, "both sides have cluster id " +
                                             std::to_string(self.cluster_id) +
                                             "; give each process its own");
    }
    check_mode(self.remote_access, hello.remote_access);
    return hello;
  });
}

// What follows the Welcome, unless the dialling side says instead that the two are linked already.
template <typename Receive>
auto or_agree(uint64_t cluster_id, const ListenerActions& actions, Receive receive) {
  try {
    return receive();
  } catch (const Error& error) {
    if (error.status() == Status::kAlreadyLink) actions.agree_linked(cluster_id);
    throw;
  }
}

UniqueFd duplicate(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy) {
    throw Error(Status::kLinkFailed, "no descriptor for another link: " + errno_text(errno) +
                                         "; raise the limit of open files");
  }
  return copy;
}

// The listening side's half on the Unix socket. The dialling side may still give up on TCP.
void meet_on_socket(const Identity& self, const Prober& prober, uint64_t cluster_id, int tcp,
                    const WaitLimit& limit, const ListenerActions& actions) {
  Rendezvous rendezvous;
  Welcome welcome = welcome_of(self);
  welcome.socket_path = rendezvous.socket_path();
  send_frame(tcp, MessageType::kWelcome, welcome.encode(), limit);
  Visitor visitor = or_agree(
      cluster_id, actions, [&] { return receive_visitor(rendezvous, welcome.token, tcp, limit); });
  // `file` takes the socket; the copy is for telling the peer when it refuses.
  UniqueFd socket = duplicate(visitor.socket.get());
  send_frame(socket.get(), MessageType::kIntroduce, introduction(self, welcome.token).encode(),
             limit);
  or_reject(socket.get(), limit, [&] {
    check_transport(self, visitor.introduce);
    prober.probe(visitor.process.pid, visitor.introduce.nonce_addr, visitor.introduce.nonce);
    expect(socket.get(), MessageType::kVerdict, limit);
    actions.file(greeted(self, cluster_id, std::move(visitor.socket), std::move(visitor.process),
                         visitor.introduce));
  });
}

// The listening side's half over TCP alone. The caller keeps `tcp`, to tell the peer of a failure.
void stage_with_dialer(const Identity& self, uint64_t cluster_id, const UniqueFd& tcp,
                       const WaitLimit& limit, const ListenerActions& actions) {
  Welcome welcome = welcome_of(self);
  send_frame(tcp.get(), MessageType::kWelcome, welcome.encode(), limit);
  Stage peer = or_agree(cluster_id, actions, [&] {
    return Stage::decode(expect(tcp.get(), MessageType::kStage, limit).payload);
  });
  if (peer.token != welcome.token) {
    throw Error(Status::kLinkFailed, "the caller repeats another number than it was given");
  }
  check_proof(peer, self.link_secret, nullptr);
  std::unique_ptr<NixlMemory> memory = self.nixl->make();
  memory->connect(peer);
  Stage own = memory->stage(welcome.token);
  own.proof = own.prove(self.link_secret, &peer.proof);
  send_frame(tcp.get(), MessageType::kStage, own.encode(), limit);
  memory->probe(limit, [&tcp] { return readable(tcp.get()); });
  expect(tcp.get(), MessageType::kVerdict, limit);
  UniqueFd connection = duplicate(tcp.get());
  prepare_connection(connection.get());
  actions.file({cluster_id, std::move(connection), {}, std::move(memory)});
}

}  // namespace

Greeted greet_over(const Identity& self, const Prober& prober, uint64_t cluster_id,
                   UniqueFd connection, const WaitLimit& limit,
                   const std::function<void()>& confirm, const std::string& link_secret) {
  return or_reject(connection.get(), limit, [&] {
    return greet_listener_checked(self, prober, {cluster_id, link_secret, confirm}, connection,
                                  limit);
  });
}

Greeted greet_listener(const Identity& self, const Prober& prober, const DialTarget& target,
                       const WaitLimit& limit, const std::function<void()>& confirm) {
  auto greet_as = [&](const Identity& caller) {
    UniqueFd tcp = dial_tcp(target.ip, target.port, limit);
    return greet_over(caller, prober, target.cluster_id, std::move(tcp), limit, confirm,
                      target.link_secret);
  };
  std::string unreachable;
  try {
    return greet_as(self);
  } catch (const OutOfReach& error) {
    unreachable = error.what();
  }
  Identity caller = self;
  caller.transport = Transport::kNixl;
  try {
    Greeted greeted = greet_as(caller);
    log(LogLevel::kWarning,
        "cluster " + std::to_string(target.cluster_id) +
            ": the link goes over NIXL, which is slower within a host: " + unreachable);
    return greeted;
  } catch (const Error& error) {
    throw Error(error.status(), unreachable + "; and over NIXL: " + error.what());
  }
}

void greet_as_linked(const Identity& self, uint64_t cluster_id, UniqueFd connection,
                     const WaitLimit& limit) {
  exchange_hello(self, cluster_id, connection.get(), limit);
  Outcome linked{Status::kAlreadyLink, "the two processes are linked already"};
  send_frame(connection.get(), MessageType::kReject, linked.encode(), limit);
  Outcome answer = Outcome::decode(read_frame(connection.get(), limit).payload);
  if (answer.status != Status::kAlreadyLink) throw Error(answer.failure(), answer.text);
}

void greet_dialer(const Identity& self, const Prober& prober, UniqueFd tcp, int stop_fd,
                  std::optional<uint64_t>& claimed_cluster_id, const ListenerActions& actions) {
  Hello hello = receive_hello(self, tcp.get(), stop_fd, claimed_cluster_id);
  if (actions.heard) actions.heard();
  int64_t timeout_ms = std::clamp(hello.timeout_ms, 1U, kMaxHandshakeMs);
  WaitLimit limit{Deadline::after_ms(timeout_ms), stop_fd};
  or_reject(tcp.get(), limit, [&] {
    if (needs_nixl_with(self, hello.transport, hello.host)) {
      stage_with_dialer(self, hello.cluster_id, tcp, limit, actions);
    } else {
      meet_on_socket(self, prober, hello.cluster_id, tcp.get(), limit, actions);
    }
  });
}

}  // namespace llmdd
