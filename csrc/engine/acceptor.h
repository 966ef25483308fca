// The listening side: one thread that accepts TCP connections, and a short-lived one per handshake,
// so that a silent caller keeps nobody else waiting.
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
  using Greet = std::function<void(UniqueFd tcp)>;  // must not throw

  // Listens at once; port 0 picks a free one. Throws Error(kFailed) when the address cannot be
  // used.
  Acceptor(const std::string& ip, uint16_t port, const SignalFd& stop, Greet greet);
  Acceptor(const Acceptor&) = delete;
  Acceptor& operator=(const Acceptor&) = delete;
  // Waits for its threads; `stop` must be set.
  ~Acceptor();

  uint16_t port() const { return port_; }

 private:
  struct Greeter {
    std::thread thread;
    std::atomic<bool> done{false};
  };

  void run();
  void accept_all();
  void start_greeter(UniqueFd tcp);
  void reap();

  const SignalFd& stop_;
  const Greet greet_;
  UniqueFd listener_;
  uint16_t port_ = 0;
  std::list<Greeter> greeters_;  // accept thread only
  std::thread thread_;
};

}  // namespace llmdd
