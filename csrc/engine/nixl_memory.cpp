#include "engine/nixl_memory.h"

#include <unistd.h>

#include <deque>

#include "engine/copy_pace.h"
#include "engine/copy_pieces.h"
#include "engine/link.h"
#include "engine/plan_chunks.h"
#include "engine/poll_pause.h"
#include "engine/slot_copies.h"

namespace llmdd {
namespace {

// Fetches of one copy on their way at once; other copies over the link use the rest of the slots.
constexpr size_t kMostFetches = 4;
constexpr size_t kMaxPieces = 1U << 16;  // a message of 1 MiB
// A copy is cut at least so fine that its parts overlap, unless they become too small to pay.
constexpr uint64_t kSmallestChunk = 256U << 10;
constexpr size_t kProbeBytes = 64;
// What a copy that was stopped has still on its way has ended by then, or the link ends.
constexpr int64_t kDrainMs = 10'000;

uint64_t chunk_bytes(const CopyPlan& plan) {
  return std::clamp<uint64_t>(total_bytes(plan) / kMostFetches, kSmallestChunk, kSlotBytes);
}

Bytes fetch_message(size_t slot, const std::vector<Piece>& pieces) {
  Fetch fetch;
  fetch.slot = static_cast<uint32_t>(slot);
  fetch.pieces.reserve(pieces.size());
  for (const Piece& piece : pieces) fetch.pieces.push_back({piece.src, piece.length});
  return fetch.encode();
}

// A slot whose bytes are all there. It is given back whatever becomes of them.
class ArrivedSlot {
 public:
  ArrivedSlot(StagingSlab& slab, size_t slot) : slab_(slab), slot_(slot) {}
  ArrivedSlot(const ArrivedSlot&) = delete;
  ArrivedSlot& operator=(const ArrivedSlot&) = delete;
  ~ArrivedSlot() { slab_.release(slot_); }

  const uint8_t* data() const { return slab_.slot(slot_); }

 private:
  StagingSlab& slab_;
  const size_t slot_;
};

}  // namespace

struct NixlMemory::Fetching {
  size_t slot = 0;
  std::vector<Piece> pieces;
  Link::Sent sent;
};

struct NixlMemory::Abandoned {
  Fetching fetch;
  Deadline deadline;
};

// The fetches of one copy. What is on its way at the end is waited for by another thread.
class NixlMemory::Fetches {
 public:
  explicit Fetches(NixlMemory& memory) : memory_(memory) {}
  Fetches(const Fetches&) = delete;
  Fetches& operator=(const Fetches&) = delete;
  ~Fetches() {
    if (fetching_.empty()) return;
    try {
      abandon();
    } catch (const std::exception& error) {
      memory_.link_->fail(error.what());  // then no slot is used again
    }
  }

  bool empty() const { return fetching_.empty(); }

  void start(PlanChunks& chunks) {
    while (!chunks.empty() && fetching_.size() < kMostFetches) {
      std::optional<size_t> slot = memory_.free_slot();
      if (!slot) return;
      Fetching fetch{*slot, chunks.next(), {}};
      // Throws when the link has ended; then no slot is used again.
      fetch.sent =
          memory_.link_->start(MessageType::kFetch, fetch_message(fetch.slot, fetch.pieces));
      fetching_.push_back(std::move(fetch));
    }
  }

  // The oldest, when its bytes are in its slot. Throws what the peer answers.
  std::optional<Fetching> take() {
    if (fetching_.empty()) return std::nullopt;
    try {
      if (!memory_.link_->try_finish(fetching_.front().sent)) return std::nullopt;
    } catch (const Error&) {
      drop_oldest();
      throw;
    }
    Fetching oldest = std::move(fetching_.front());
    fetching_.pop_front();
    return oldest;
  }

 private:
  // By whoever needs a slot; the job is for the case that nobody does.
  void abandon() {
    {
      std::lock_guard lock(memory_.abandoned_mutex_);
      for (Fetching& fetch : fetching_) {
        memory_.abandoned_.push_back({std::move(fetch), Deadline::after_ms(kDrainMs)});
      }
    }
    NixlMemory* memory = &memory_;
    memory_.requests_.post([memory] { memory->drain(); }, RequestQueue::Order::kNext);
  }

  // The peer has written nothing, or the link has ended and the slot is not used again.
  void drop_oldest() {
    if (memory_.link_->linked()) memory_.slab_.release(fetching_.front().slot);
    fetching_.pop_front();
  }

  NixlMemory& memory_;
  std::deque<Fetching> fetching_;
};

NixlMemory::NixlMemory(std::shared_ptr<const NixlLibrary> nixl, size_t num_slots)
    : slab_(num_slots), agent_(std::move(nixl)) {
  agent_.register_memory(slab_.data(), slab_.size());
}

NixlMemory::~NixlMemory() { end(); }

Stage NixlMemory::stage(const Nonce& token) {
  SlabFacts slab{reinterpret_cast<uint64_t>(slab_.data()),
                 static_cast<uint32_t>(slab_.num_slots())};
  return {token, slab, agent_.metadata()};
}

void NixlMemory::connect(const Stage& peer) {
  agent_.connect(peer.metadata);
  peer_slab_ = peer.slab;
}

void NixlMemory::probe(const WaitLimit& limit, const std::function<bool()>& peer_done) {
  try {
    std::unique_ptr<NixlAgent::Write> write =
        agent_.write(slab_.data(), peer_slab_.addr, kProbeBytes);
    progress_until([&] { return write->done() && peer_done(); }, limit);
  } catch (const Error& error) {
    throw Error(Status::kLinkFailed,
                std::string("bytes do not reach the peer through NIXL: ") + error.what() +
                    "; UCX_TLS and UCX_NET_DEVICES on both sides must name a network that joins "
                    "them");
  }
}

void NixlMemory::progress_until(const std::function<bool()>& condition, const WaitLimit& limit) {
  PollPause pause;
  while (!condition()) {
    agent_.progress();
    if (readable(limit.stop_fd)) throw Error(Status::kFailed, "the engine is being finalized");
    if (limit.deadline.passed()) throw Error(Status::kTimeout, "the peer did not answer in time");
    pause.pause();
  }
}

void NixlMemory::attach(Link& link, RequestHandler& handler) {
  link_ = &link;
  handler_ = &handler;
  server_ = std::make_unique<FetchServer>(agent_, peer_slab_, link, handler);
}

bool NixlMemory::take(const Frame& request) {
  if (request.type == MessageType::kFetch) {
    server_->post(request);
  } else {
    // A peer that pushes layer by layer sends the next before it has the answer to the last: while
    // the end of one is on its way, the next one's first bytes are.
    requests_.post([this, request] { answer(request); }, request.type == MessageType::kPush
                                                             ? RequestQueue::Order::kBesideOthers
                                                             : RequestQueue::Order::kAlone);
  }
  return true;
}

void NixlMemory::answer(const Frame& request) {
  try {
    handler_->handle(*link_, request);
  } catch (const std::exception& error) {
    link_->fail(error.what());
  }
}

void NixlMemory::end() {
  requests_.end();
  if (server_) server_->end();
}

void NixlMemory::copy(const CopyPlan& plan, const std::function<void()>& checkpoint) {
  if (plan.runs.empty()) return;
  CacheMemory memory = plan.dst_mapped ? CacheMemory::kMapped : CacheMemory::kUnknown;
  PlanChunks chunks(plan, chunk_bytes(plan), kMaxPieces);
  Fetches fetches(*this);
  CopyPace pace;
  PollPause pause;
  while (!chunks.empty() || !fetches.empty()) {
    checkpoint();
    fetches.start(chunks);
    agent_.progress();
    std::optional<Fetching> fetched = fetches.take();
    if (!fetched) {
      pause.pause();
      continue;
    }
    ArrivedSlot slot(slab_, fetched->slot);
    fetches.start(chunks);
    checkpoint();
    pace.keep(scatter(slot.data(), fetched->pieces, memory, [this] { agent_.progress(); }));
    pause.reset();
  }
  checkpoint();
}

std::optional<size_t> NixlMemory::free_slot() {
  std::optional<size_t> slot = slab_.acquire();
  if (slot) return slot;
  reclaim();
  return slab_.acquire();
}

// A slot that the peer may still write into must not be used again.
NixlMemory::Left NixlMemory::reclaim() {
  std::lock_guard lock(abandoned_mutex_);
  Left left = Left::kNothing;
  for (auto it = abandoned_.begin(); it != abandoned_.end();) {
    if (!is_answered(it->fetch)) {
      if (left != Left::kTooLate) left = it->deadline.passed() ? Left::kTooLate : Left::kSome;
      ++it;
      continue;
    }
    if (link_->linked()) slab_.release(it->fetch.slot);
    it = abandoned_.erase(it);
  }
  return left;
}

void NixlMemory::drain() {
  PollPause pause;
  try {
    for (Left left = reclaim(); left != Left::kNothing; left = reclaim()) {
      if (left == Left::kTooLate) return link_->fail("the bytes of a stopped copy did not end");
      agent_.progress();
      pause.pause();
    }
  } catch (const Error& error) {
    link_->fail(error.what());
  }
}

// Whether nothing is written for it any more: all was, or the peer refused it, or the link ended.
bool NixlMemory::is_answered(const Fetching& fetch) {
  try {
    return link_->try_finish(fetch.sent).has_value();
  } catch (const Error&) {
    return true;
  }
}

}  // namespace llmdd
