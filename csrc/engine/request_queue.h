// A thread that does the jobs it is given, in order. It starts with the first one.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace llmdd {

class RequestQueue {
 public:
  using Job = std::function<void()>;  // throws nothing

  RequestQueue() = default;
  RequestQueue(const RequestQueue&) = delete;
  RequestQueue& operator=(const RequestQueue&) = delete;
  ~RequestQueue() { end(); }

  // Dropped once `end` was called.
  void post(Job job);
  // Drops what has not begun and returns when the job in progress is done.
  void end();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace llmdd
