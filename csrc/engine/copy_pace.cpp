#include "engine/copy_pace.h"

#include <atomic>
#include <thread>

namespace llmdd {
namespace {

std::atomic<uint64_t> g_rate{0};

}  // namespace

void set_copy_rate(uint64_t bytes_per_second) { g_rate = bytes_per_second; }

bool copies_are_slowed() { return g_rate.load(std::memory_order_relaxed) != 0; }

void CopyPace::keep(uint64_t bytes) {
  copied_ += bytes;
  uint64_t rate = g_rate.load(std::memory_order_relaxed);
  if (rate == 0) return;
  std::chrono::duration<double> needed(static_cast<double>(copied_) / static_cast<double>(rate));
  using Clock = std::chrono::steady_clock;
  std::this_thread::sleep_until(begin_ + std::chrono::duration_cast<Clock::duration>(needed));
}

}  // namespace llmdd
