#include "engine/request_queue.h"

#include <system_error>

namespace llmdd {

void RequestQueue::post(Job job, Order order) {
  std::lock_guard lock(mutex_);
  if (ended_) return;
  bool all_busy = running_ + waiting_.size() >= threads_.size();
  if (all_busy && threads_.size() < max_threads_) add_thread_locked();
  waiting_.insert(order == Order::kNext ? waiting_.begin() : waiting_.end(),
                  {std::move(job), order});
  changed_.notify_one();
}

void RequestQueue::add_thread_locked() {
  try {
    threads_.emplace_back(&RequestQueue::run, this);
  } catch (const std::system_error&) {
    if (threads_.empty()) throw;  // else those that there are do it
  }
}

void RequestQueue::end() {
  std::vector<std::thread> threads;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
    threads.swap(threads_);
  }
  for (std::thread& thread : threads) thread.join();
}

bool RequestQueue::may_begin_locked() const {
  if (waiting_.empty() || alone_) return false;
  return running_ == 0 || waiting_.front().order != Order::kAlone;
}

void RequestQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ended_ || may_begin_locked(); });
    if (ended_) return;
    Waiting next = std::move(waiting_.front());
    waiting_.pop_front();
    alone_ = next.order == Order::kAlone;
    ++running_;
    lock.unlock();
    next.job();
    next.job = nullptr;
    lock.lock();
    --running_;
    alone_ = false;
    changed_.notify_all();
  }
}

}  // namespace llmdd
