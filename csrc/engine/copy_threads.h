// A few threads that help with large copies, asleep while there are none.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace llmdd {

class CopyThreads {
 public:
  // Helpers beside the calling thread; they are started with the first job that can use them.
  explicit CopyThreads(size_t helpers) : helpers_(helpers) {}
  ~CopyThreads();
  CopyThreads(const CopyThreads&) = delete;
  CopyThreads& operator=(const CopyThreads&) = delete;

  // How many threads work on a job, the caller included.
  size_t width() const;

  // Calls `work(i)` for every i in [0, count), on this thread and those helpers that are free.
  // `before` is called on this thread before each of its own pieces; what it throws is thrown on
  // once no helper works any more, and the remaining pieces are left out. `work` must not throw.
  void run(size_t count, const std::function<void(size_t)>& work,
           const std::function<void()>& before);

 private:
  struct Job {
    const std::function<void(size_t)>& work;
    const size_t count;
    std::atomic<size_t> next{0};
    size_t helping = 0;  // guarded by mutex_

    // False when no piece is left.
    bool do_one();
  };

  void start_locked();
  void help();

  const size_t helpers_;
  std::mutex mutex_;
  std::condition_variable wanted_;
  std::condition_variable left_;
  bool stopping_ = false;
  std::list<Job*> jobs_;  // that may have pieces left
  std::vector<std::thread> threads_;
};

// As many helpers as there are other processors this process may use, up to three.
size_t usual_copy_helpers();

// Tests and benches only: at most this many threads work on one copy; 0: the usual number.
void set_copy_width(size_t threads);

}  // namespace llmdd
