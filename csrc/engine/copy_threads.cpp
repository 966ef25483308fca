#include "engine/copy_threads.h"

#include <sched.h>

#include <algorithm>
#include <system_error>

namespace llmdd {
namespace {

constexpr size_t kMaxHelpers = 3;  // more take nothing from one memory controller

std::atomic<size_t> g_width{0};

}  // namespace

void set_copy_width(size_t threads) { g_width = threads; }

size_t usual_copy_helpers() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 0;
  size_t processors = static_cast<size_t>(CPU_COUNT(&allowed));
  return std::min(processors - std::min<size_t>(processors, 1), kMaxHelpers);
}

bool CopyThreads::Job::do_one() {
  size_t piece = next.fetch_add(1);
  if (piece >= count) return false;
  work(piece);
  return true;
}

CopyThreads::~CopyThreads() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wanted_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

size_t CopyThreads::width() const {
  size_t width = g_width;
  return std::min(helpers_ + 1, width == 0 ? helpers_ + 1 : width);
}

void CopyThreads::start_locked() {
  try {
    while (threads_.size() < helpers_) threads_.emplace_back(&CopyThreads::help, this);
  } catch (const std::system_error&) {
    // Out of threads: those that exist have to do.
  }
}

void CopyThreads::help() {
  std::unique_lock lock(mutex_);
  while (true) {
    wanted_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    Job& job = *jobs_.front();
    ++job.helping;
    lock.unlock();
    while (job.do_one()) {
    }
    lock.lock();
    // Nobody else needs to look at a job without pieces.
    jobs_.remove(&job);
    if (--job.helping == 0) left_.notify_all();
  }
}

void CopyThreads::run(size_t count, const std::function<void(size_t)>& work,
                      const std::function<void()>& before) {
  Job job{work, count};
  size_t helpers = count == 0 ? 0 : std::min(width(), count) - 1;
  if (helpers > 0) {
    std::lock_guard lock(mutex_);
    start_locked();
    jobs_.push_back(&job);
  }
  for (size_t i = 0; i < helpers; ++i) wanted_.notify_one();
  auto finish = [&] {
    std::unique_lock lock(mutex_);
    jobs_.remove(&job);
    left_.wait(lock, [&job] { return job.helping == 0; });
  };
  try {
    do {
      before();
    } while (job.do_one());
  } catch (...) {
    job.next = count;
    finish();
    throw;
  }
  finish();
}

}  // namespace llmdd
