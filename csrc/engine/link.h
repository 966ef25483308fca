// One link to one peer process: a Unix socket, the thread that serves it, and the calls in flight.
//
// clang-format off
//   LINKED --fail()----> FAILED    the peer hung up, timed out or broke the protocol;
//                                  it stays in the table until it is unlinked
//   LINKED --forget()--> UNLINKED  one side asked for it
// clang-format on
//
// The thread sleeps in poll(2) until the socket, the peer's pidfd or a wake-up says otherwise. API
// threads send by themselves. A short call looks for its reply on the socket for a moment before it
// sleeps, and the thread looks for what follows a Resolve, because waking a thread can cost more
// than the call; after that, the thread hands replies to the callers that sleep.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/clock.h"
#include "common/descriptor_stream.h"
#include "common/signal_fd.h"
#include "common/status.h"
#include "common/unique_fd.h"
#include "engine/handshake.h"
#include "engine/wire.h"
#include "shm/shared_regions.h"

namespace llmdd {

class Link;
struct Fetch;

// Answers the peer's requests, on the link's thread or, over NIXL, on one thread in its place.
class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  // Answers with `link.reply`. WireError ends the link.
  virtual void handle(Link& link, const Frame& request) = 0;
  // Copies what a peer fetches out of registered memory to `to`, which has room for a staging slot;
  // returns how many bytes. `meanwhile` is called between parts of the copy and must not wait for a
  // peer. Throws Error(kKvCacheNotExist). Only for links over NIXL, on a thread of theirs.
  virtual size_t gather(const Fetch& fetch, uint8_t* to,
                        const std::function<void()>& meanwhile) = 0;
};

class Link {
 private:
  struct Pending {
    std::optional<Frame> reply;
  };

 public:
  // A request that was sent. Its reply is dropped if nobody calls `finish`.
  struct Sent {
    MessageType request = MessageType::kFailure;
    uint64_t call_id = 0;
    std::shared_ptr<Pending> pending;
  };

  // `first_message` goes out before anything else, whoever sends first.
  Link(Greeted peer, RequestHandler& handler, Bytes first_message = {});
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  uint64_t cluster_id() const { return cluster_id_; }
  PeerMemory& peer_memory() const { return *memory_; }
  // Over NIXL, where the process is unknown: whether it has closed its end.
  bool peer_ended() const { return peer_.pidfd ? peer_.ended() : hung_up(); }

  void start();

  // Marks a link that a collective link() makes. Until it is released it serves the peer, and no
  // call of this process may use it.
  void hold() { collective_ = held_ = true; }
  void release() { held_ = false; }
  bool held() const { return held_; }
  bool collective() const { return collective_; }

  // Sends a request and returns its reply. Throws Error: the peer's own for kFailure, kTimeout at
  // the deadline (the link fails then), kFailed when the link ends first.
  Frame call(MessageType request, const Bytes& payload, const Deadline& deadline);
  // The same in two halves, without the moment of looking: the peer answers requests in the order
  // they were sent.
  Sent start(MessageType request, const Bytes& payload);
  Frame finish(const Sent& sent, const Deadline& deadline);
  // Looks a while for the reply before the caller sleeps in `finish`; for one that is worth a
  // processor meanwhile.
  void look(const Sent& sent);
  // The reply, if it is there; without a wait. Throws as `finish` does.
  std::optional<Frame> try_finish(const Sent& sent);
  void reply(MessageType type, uint64_t call_id, const Bytes& payload);

  // Tells the peer of shared memory before any message that is sent afterwards names its addresses;
  // each file once, and only to a peer that maps it.
  void offer(const SharedFiles& files);
  void withdraw(uint64_t file_id);

  // Throws Error(kFailed) with the reason unless the link is LINKED and the peer holds its end.
  void check() const;
  bool linked() const;
  bool hung_up() const;
  bool thread_done() const { return thread_done_; }

  // The peer has asked to unlink: that it closes the link next is no failure.
  void part() { parting_ = true; }
  void fail(const std::string& reason);
  void forget(const std::string& reason);
  // Waits for the threads. Not called by one of them.
  void join();

 private:
  enum class State { kLinked, kFailed, kUnlinked };

  void run();
  void step();
  void receive();
  // Both under receive_mutex_: reads once from the socket; takes the first whole frame.
  ssize_t read_socket();
  std::optional<Frame> take_frame();
  bool reply_is_next() const;
  void take_notice(const Frame& frame);
  void receive_replies();
  void look_for_reply(const Pending& pending, std::chrono::microseconds how_long);
  void look_for_request();
  void dispatch(Frame frame);
  void deliver(Frame frame);
  void send(const Bytes& frame);
  void retract_locked(uint64_t file_id);
  bool wants_to_send() const;
  bool end(State state, const std::string& reason);
  void hang_up();
  void throw_if_ended_locked() const;
  Frame checked_reply(MessageType request, Frame reply) const;
  Frame checked_or_fail(MessageType request, Frame reply);

  const uint64_t cluster_id_;
  const UniqueFd socket_;
  const PeerProcess peer_;
  const std::unique_ptr<PeerMemory> memory_;
  const bool peer_maps_shared_;
  RequestHandler& handler_;
  const SignalFd wake_;
  std::mutex thread_mutex_;  // a link may be unlinked before its thread has started
  std::thread thread_;
  std::atomic<bool> thread_done_{false};
  std::atomic<bool> parting_{false};
  std::atomic<bool> held_{false};
  std::atomic<bool> collective_{false};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kLinked;
  std::string reason_;
  uint64_t next_call_id_ = 1;
  std::map<uint64_t, std::shared_ptr<Pending>> pending_;

  mutable std::mutex send_mutex_;
  OutgoingStream outgoing_;
  std::map<uint64_t, std::weak_ptr<SharedFile>> offered_;
  std::mutex receive_mutex_;  // taken before mutex_
  Bytes incoming_;
  std::deque<UniqueFd> incoming_fds_;
};

}  // namespace llmdd
