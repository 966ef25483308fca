// The listening side: one thread that accepts TCP connections, and a short-lived one per handshake,
// so that a silent caller keeps nobody else waiting. Their number is bounded; at the bound a new
// caller takes the place of the one that has been silent for longest.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <thread>

#include "common/signal_fd.h"
#include "common/unique_fd.h"

namespace llmdd {

class Acceptor {
 public:
  // Must not throw, and must return soon after `stop_fd` has become readable. Sets `heard` once the
  // caller has said who it is.
  using Greet = std::function<void(UniqueFd tcp, int stop_fd, std::atomic<bool>& heard)>;

  // Listens at once; port 0 picks a free one. Throws Error(kFailed) when the address cannot be
  // used.
  Acceptor(const std::string& ip, uint16_t port, Greet greet);
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;
  // Stops its threads and waits for them.
  ~Acceptor();

  uint16_t port() const { return port_; }

 private:
  struct Greeter {
    const SignalFd stop;
    std::atomic<bool> heard{false};
    std::atomic<bool> done{false};
    std::thread thread;
  };

  void run();
  void accept_all();
  void start_greeter(UniqueFd tcp);
  bool make_room();
  void reap();

  const SignalFd stop_;
  const Greet greet_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::list<Greeter> greeters_;  // accept thread only
  std::thread thread_;
};

}  // namespace llmdd
