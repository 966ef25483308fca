#include "engine/copy_pieces.h"

#include <algorithm>
#include <numeric>

namespace llmdd {
namespace {

constexpr uint64_t kUnitBytes = 512 << 10;
// A bitmap of so many grains costs less than sorting the runs.
constexpr uint64_t kMaxGrainsPerRun = 1024;

bool runs_overlap(std::vector<ByteRun> runs) {
  std::sort(runs.begin(), runs.end(),
            [](const ByteRun& a, const ByteRun& b) { return a.dst_offset < b.dst_offset; });
  for (size_t i = 1; i < runs.size(); ++i) {
    if (runs[i].dst_offset - runs[i - 1].dst_offset < runs[i - 1].length) return true;
  }
  return false;
}

// The largest size that divides all offsets and lengths; runs are usually blocks.
uint64_t grain_of(const std::vector<ByteRun>& runs) {
  uint64_t grain = 0;
  for (const ByteRun& run : runs) {
    for (uint64_t number : {run.dst_offset, run.length}) {
      if (grain == 0 || number % grain != 0) grain = std::gcd(grain, number);
    }
  }
  return grain;
}

bool grains_overlap(const std::vector<ByteRun>& runs, uint64_t grain, uint64_t first,
                    uint64_t grains) {
  std::vector<bool> seen(grains);
  for (const ByteRun& run : runs) {
    uint64_t begin = (run.dst_offset - first) / grain;
    for (uint64_t i = begin; i < begin + run.length / grain; ++i) {
      if (seen[i]) return true;
      seen[i] = true;
    }
  }
  return false;
}

}  // namespace

uint64_t total_bytes(const CopyPlan& plan) {
  uint64_t bytes = 0;
  for (const ByteRun& run : plan.runs) bytes += run.length;
  return bytes * plan.src_bases.size();
}

bool writes_once(const CopyPlan& plan) {
  if (plan.runs.empty()) return true;
  uint64_t first = UINT64_MAX;
  uint64_t end = 0;
  for (const ByteRun& run : plan.runs) {
    first = std::min(first, run.dst_offset);
    end = std::max(end, run.dst_offset + run.length);
  }
  std::vector<uint64_t> bases = plan.dst_bases;
  std::sort(bases.begin(), bases.end());
  for (size_t i = 1; i < bases.size(); ++i) {
    if (bases[i] - bases[i - 1] < end - first) return false;
  }
  uint64_t grain = grain_of(plan.runs);
  uint64_t grains = (end - first) / grain;
  if (grains > plan.runs.size() * kMaxGrainsPerRun) return !runs_overlap(plan.runs);
  return !grains_overlap(plan.runs, grain, first, grains);
}

// The first `length` bytes of what is left of the current run.
void PieceCutter::cut(PieceBatch& batch, uint64_t length) {
  const ByteRun& run = plan_.runs[run_];
  uint64_t src = plan_.src_bases[tensor_] + run.src_offset + offset_;
  uint64_t dst = plan_.dst_bases[tensor_] + run.dst_offset + offset_;
  if (range_ == nullptr || src - range_->addr >= range_->length) range_ = view_.at_or_above(src);
  if (range_ != nullptr && range_->addr <= src) {
    uint64_t inside = src - range_->addr;
    length = std::min({length, range_->length - inside, kUnitBytes});
    if (unit_bytes_ == 0 || unit_bytes_ + length > kUnitBytes) {
      batch.units.push_back(batch.pieces.size());
      unit_bytes_ = 0;
    }
    unit_bytes_ += length;
    batch.pieces.push_back({reinterpret_cast<uint8_t*>(dst), range_->bytes + inside, length});
  } else {
    if (range_ != nullptr) length = std::min(length, range_->addr - src);
    batch.rest.runs.push_back({src, dst, length});
    range_ = nullptr;
  }
  batch.bytes += length;
  offset_ += length;
  if (offset_ < run.length) return;
  offset_ = 0;
  if (++run_ < plan_.runs.size()) return;
  run_ = 0;
  ++tensor_;
}

bool PieceCutter::next(PieceBatch& batch, uint64_t max_bytes, size_t max_pieces) {
  batch.pieces.clear();
  batch.units.clear();
  batch.rest = {{0}, {0}, {}};
  batch.bytes = 0;
  unit_bytes_ = 0;
  if (plan_.runs.empty()) return false;
  while (tensor_ < plan_.src_bases.size() && batch.bytes < max_bytes &&
         batch.pieces.size() + batch.rest.runs.size() < max_pieces) {
    cut(batch, std::min(plan_.runs[run_].length - offset_, max_bytes - batch.bytes));
  }
  return batch.bytes > 0;
}

}  // namespace llmdd
