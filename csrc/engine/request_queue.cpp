#include "engine/request_queue.h"

namespace llmdd {

void RequestQueue::post(Job job) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  jobs_.push_back(std::move(job));
  if (!thread_.joinable()) thread_ = std::thread(&RequestQueue::run, this);
  changed_.notify_one();
}

void RequestQueue::end() {
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_one();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

void RequestQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ended_ || !jobs_.empty(); });
    if (ended_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

}  // namespace llmdd
