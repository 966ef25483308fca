#include "engine/push_receiver.h"

#include <algorithm>
#include <string>

namespace llmdd {
namespace {

constexpr uint32_t kMaxPushMs = 10U * 60 * 1000;

[[noreturn]] void invalid(const std::string& text) { throw Error(Status::kParamInvalid, text); }

std::string interval(uint64_t first, uint64_t end) {
  return "[" + std::to_string(first) + ", " + std::to_string(end) + ")";
}

void check_run(const char* side, uint64_t first, uint64_t count, uint64_t blocks) {
  uint64_t end = 0;
  if (__builtin_add_overflow(first, count, &end) || end > blocks || count == 0) {
    invalid(std::string(side) + " blocks " + interval(first, end) + " are outside " +
            interval(0, blocks));
  }
}

// A block of the source is as long as one of the destination; the source's last may be shorter.
ByteRun to_bytes(const Push& push, const BlockRun& run) {
  uint64_t blocks = (push.src_bytes - 1) / push.block_bytes + 1;
  check_run("source", run.src, run.count, blocks);
  ByteRun bytes;
  bytes.src_offset = run.src * push.block_bytes;
  bytes.length = run.src + run.count == blocks ? push.src_bytes - bytes.src_offset
                                               : run.count * push.block_bytes;
  uint64_t end = 0;
  if (__builtin_mul_overflow(run.dst, push.block_bytes, &bytes.dst_offset) ||
      __builtin_add_overflow(bytes.dst_offset, bytes.length, &end)) {
    invalid("destination block " + std::to_string(run.dst) + " lies beyond all memory");
  }
  return bytes;
}

std::vector<ByteRun> to_bytes(const Push& push, const std::vector<BlockRun>& runs) {
  if (push.src_bytes == 0 || push.block_bytes == 0) throw WireError("a push of nothing");
  std::vector<ByteRun> bytes;
  bytes.reserve(runs.size());
  for (const BlockRun& run : runs) bytes.push_back(to_bytes(push, run));
  return bytes;
}

// With a reservation a run's destination is a position in it.
std::vector<BlockRun> placed_runs(const Push& push, const Reservation* reservation) {
  if (reservation == nullptr) return push.runs;
  std::vector<uint64_t> src;
  std::vector<uint64_t> dst;
  for (const BlockRun& run : push.runs) {
    check_run("reserved", run.dst, run.count, reservation->blocks.size());
    if (run.count > reservation->blocks.size() - src.size()) invalid("a position comes twice");
    for (uint64_t i = 0; i < run.count; ++i) {
      src.push_back(run.src + i);
      dst.push_back(reservation->blocks[run.dst + i]);
    }
  }
  return merge_blocks(src, dst);
}

std::vector<ByteRun> blocks_to_blocks(const Push& push, const Reservation* reservation,
                                      const CacheLayout& layout) {
  if (!layout.is_blocks) invalid("blocks go to a blocks cache, the destination has rows");
  if (push.block_bytes != layout.stride) {
    invalid("block size differs: destination " + std::to_string(layout.stride) +
            " bytes, source has " + std::to_string(push.block_bytes));
  }
  std::vector<BlockRun> runs = placed_runs(push, reservation);
  for (const BlockRun& run : runs) check_run("destination", run.dst, run.count, layout.rows);
  return to_bytes(push, runs);
}

// A row comes as one run. Named by a BlocksCacheKey, the destination takes it at its start.
std::vector<ByteRun> row_to_row(const Push& push, const CacheLayout& layout) {
  bool whole = push.runs.size() == 1 && push.runs[0].src == 0 && push.runs[0].count == 1;
  if (!whole || push.block_bytes != push.src_bytes) {
    throw WireError("a row is pushed as one run");
  }
  bool at_start = push.target.kind == KeyKind::kBlocks;
  if (layout.is_blocks != at_start) invalid("a row goes to a row, name it by cache id");
  uint64_t row = at_start ? 0 : push.target.row;
  check_run("destination", row, 1, layout.rows);
  uint64_t room = at_start ? layout.tensor_bytes() : layout.stride;
  if (push.src_bytes > room) {
    invalid("row size differs: destination " + std::to_string(room) + " bytes, source has " +
            std::to_string(push.src_bytes));
  }
  return {{0, row * layout.stride, push.src_bytes}};
}

std::vector<uint64_t> destination_bases(const Push& push, const CacheLayout& layout) {
  TensorRange tensors =
      select_tensors(push.dst_layers, layout.tensor_addrs.size(), push.tensors_per_layer);
  if (tensors.count != push.src_addrs.size()) {
    invalid("number of tensors differs: destination " + std::to_string(tensors.count) +
            ", source has " + std::to_string(push.src_addrs.size()));
  }
  auto first = layout.tensor_addrs.begin() + tensors.first;
  return {first, first + tensors.count};
}

// The bytes from the first to the last that any run writes, relative to a tensor's start.
struct Span {
  uint64_t first = UINT64_MAX;
  uint64_t end = 0;
};

Span span_of(const std::vector<ByteRun>& runs) {
  Span span;
  for (const ByteRun& run : runs) {
    span.first = std::min(span.first, run.dst_offset);
    span.end = std::max(span.end, run.dst_offset + run.length);
  }
  return span;
}

}  // namespace

PushReceiver::Plan PushReceiver::plan_by_key(const Push& push,
                                             const Reservation* reservation) const {
  if (!remote_access_) invalid("a push by key needs enable_remote_cache_accessible = True");
  CacheRef cache_only = push.target;
  cache_only.row = 0;  // a row beyond the cache is another error than a missing cache
  // Found once more by id: what is deallocated stays for its keys, to be read only.
  std::shared_ptr<Cache> cache = caches_.get(caches_.find(cache_only).cache->id);
  const CacheLayout& layout = cache->layout;
  if (!layout.remote_accessible) invalid("the destination cache is not remote accessible");
  if (reservation == nullptr && cache->reserved_only) {
    invalid("the destination cache takes pushes into its reservations only");
  }
  if (reservation != nullptr && (reservation->cache != cache || !push.to_blocks)) {
    invalid("the token reserves blocks of cache " + std::to_string(reservation->cache->id));
  }
  std::vector<uint64_t> bases = destination_bases(push, layout);
  std::vector<ByteRun> runs =
      push.to_blocks ? blocks_to_blocks(push, reservation, layout) : row_to_row(push, layout);
  return {{push.src_addrs, std::move(bases), std::move(runs)}, {cache}};
}

// Addresses come from the message, so all that is written must lie in registered memory.
PushReceiver::Plan PushReceiver::plan_by_address(const Push& push) const {
  if (remote_access_) invalid("raw addresses need enable_remote_cache_accessible = False");
  if (push.dst_addrs.size() != push.src_addrs.size()) {
    throw WireError("a push has one destination address for each source address");
  }
  Plan plan{{push.src_addrs, push.dst_addrs, to_bytes(push, push.runs)}, {}};
  if (plan.copy.runs.empty()) throw WireError("a push of nothing");
  Span span = span_of(plan.copy.runs);
  for (uint64_t addr : push.dst_addrs) {
    uint64_t first = 0;
    if (__builtin_add_overflow(addr, span.first, &first)) first = UINT64_MAX;
    plan.caches.push_back(caches_.containing(first, span.end - span.first));
  }
  return plan;
}

PushReceiver::Plan PushReceiver::plan(const Push& push, const Reservation* reservation) const {
  if (push.dst_addrs.empty()) return plan_by_key(push, reservation);
  if (reservation != nullptr) invalid("a token goes with a cache key, not with addresses");
  return plan_by_address(push);
}

void PushReceiver::copy(Link& link, const Push& push) {
  if (push.token == 0) return run(link, push, nullptr);
  ReservationUse use(reservations_, reservations_.get(push.token));
  run(link, push, &*use);
}

void PushReceiver::run(Link& link, const Push& push, const Reservation* reservation) {
  Plan planned = plan(push, reservation);
  Deadline deadline = Deadline::after_ms(std::min(push.timeout_ms, kMaxPushMs));
  std::vector<CacheUse> uses;
  planned.copy.dst_mapped = true;
  for (const auto& cache : planned.caches) {
    planned.copy.dst_mapped = planned.copy.dst_mapped && cache->shared.mapped();
    uses.push_back(caches_.use(cache));
  }
  link.peer_memory().copy(planned.copy, [&] {
    // A source that has given up has closed its end and may reuse its memory.
    link.check();
    for (const CacheUse& use : uses) use.check_open();
    if (reservation != nullptr) reservation->check_open();
    if (deadline.passed()) throw Error(Status::kTimeout, "the copy did not finish in time");
  });
  if (link.peer_ended()) throw Error(Status::kFailed, "the source process ended during the copy");
}

}  // namespace llmdd
