// Memory of one link that its peer writes into, or that this process writes to the peer from, cut
// in slots of one size. It is given back only when the link's agent is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace llmdd {

// A transfer of more bytes is cut; both sides of a link go by it. Large enough for the rate of a
// network, small enough that one is filled while the next is on its way.
constexpr size_t kSlotBytes = 4U << 20;

class StagingSlab {
 public:
  // Pages are supplied when they are touched, unless the network pins them. Throws
  // Error(kOutOfMemory).
  explicit StagingSlab(size_t num_slots);
  StagingSlab(const StagingSlab&) = delete;
  StagingSlab& operator=(const StagingSlab&) = delete;
  ~StagingSlab();

  uint8_t* data() const { return data_; }
  size_t size() const { return num_slots_ * kSlotBytes; }
  size_t num_slots() const { return num_slots_; }
  uint8_t* slot(size_t index) const { return data_ + index * kSlotBytes; }

  // Empty when all are in use.
  std::optional<size_t> acquire();
  // Only when no transfer can touch the slot any more.
  void release(size_t slot);

 private:
  const size_t num_slots_;
  uint8_t* data_ = nullptr;
  std::mutex mutex_;
  std::vector<size_t> free_;
};

}  // namespace llmdd
