// The source's side of a link over NIXL: gathers what the peer fetches in a slot of its own, writes
// the slot into the peer's, and answers when the bytes are there.
//
// It has a thread, which sleeps unless there is something to write.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "common/clock.h"
#include "engine/link.h"
#include "engine/messages.h"
#include "engine/nixl_agent.h"
#include "engine/staging_slab.h"

namespace llmdd {

class FetchServer {
 public:
  // `target` is the peer's slab. What is passed by reference outlives the server.
  FetchServer(NixlAgent& agent, const SlabFacts& target, Link& link, RequestHandler& handler);
  FetchServer(const FetchServer&) = delete;
  FetchServer& operator=(const FetchServer&) = delete;
  ~FetchServer() { end(); }

  // Throws WireError for what no peer of this version sends.
  void post(const Frame& request);
  // Gives up what is on its way.
  void end();

 private:
  struct Request {
    uint64_t call_id = 0;
    Fetch fetch;
  };
  struct Sending {
    uint64_t call_id = 0;
    size_t slot = 0;
    std::unique_ptr<NixlAgent::Write> write;
    Deadline deadline;
  };

  void run();
  void serve();
  std::optional<Request> next(bool wait);
  void send(const Request& request, size_t slot);
  // True when at least one write has ended.
  bool finish_some();

  NixlAgent& agent_;
  const SlabFacts target_;
  Link& link_;
  RequestHandler& handler_;
  StagingSlab slab_;
  std::deque<Sending> sending_;  // server thread only

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Request> requests_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace llmdd
