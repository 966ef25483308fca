// Does the jobs it is given on a few threads, which start when there is something for them to do.
//
// Jobs begin in the order in which they came. Those that may run beside others do so; any other one
// waits until all before it are done, and all after it wait for its end. A job may also be put
// before all that wait, to run beside others.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace llmdd {

class RequestQueue {
 public:
  using Job = std::function<void()>;  // throws nothing
  enum class Order { kAlone, kBesideOthers, kNext };

  explicit RequestQueue(size_t max_threads) : max_threads_(max_threads) {}
  RequestQueue(const RequestQueue&) = delete;
  RequestQueue& operator=(const RequestQueue&) = delete;
  ~RequestQueue() { end(); }

  // Dropped once `end` was called. Throws std::system_error when no thread can be had.
  void post(Job job, Order order);
  // Drops what has not begun and returns when no job is in progress.
  void end();

 private:
  struct Waiting {
    Job job;
    Order order;
  };

  void add_thread_locked();
  bool may_begin_locked() const;
  void run();

  const size_t max_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  size_t running_ = 0;
  bool alone_ = false;  // the one that runs must have nothing beside it
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace llmdd
