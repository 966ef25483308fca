#include "engine/fetch_server.h"

#include <string>

#include "common/start_thread.h"
#include "engine/poll_pause.h"

namespace llmdd {
namespace {

// One is gathered while others are on their way.
constexpr size_t kSendSlots = 3;
// A peer that takes nothing for so long does not come back.
constexpr int64_t kWriteTimeoutMs = 60'000;

}  // namespace

FetchServer::FetchServer(NixlAgent& agent, const SlabFacts& target, Link& link,
                         RequestHandler& handler)
    : agent_(agent), target_(target), link_(link), handler_(handler), slab_(kSendSlots) {
  agent_.register_memory(slab_.data(), slab_.size());
}

void FetchServer::post(const Frame& frame) {
  Request request{frame.call_id, Fetch::decode(frame.payload)};
  if (request.fetch.slot >= target_.num_slots) {
    throw WireError("staging slot " + std::to_string(request.fetch.slot) + " is outside [0, " +
                    std::to_string(target_.num_slots) + ")");
  }
  std::lock_guard lock(mutex_);
  if (ended_) return;
  if (requests_.size() >= target_.num_slots) {
    throw WireError("more fetches than there are staging slots");
  }
  requests_.push_back(std::move(request));
  if (!thread_.joinable()) {
    thread_ = start_thread("the source's", Status::kFailed, &FetchServer::run, this);
  }
  changed_.notify_one();
}

void FetchServer::end() {
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_one();
    thread.swap(thread_);
  }
  if (thread.joinable()) thread.join();
}

void FetchServer::run() {
  try {
    serve();
  } catch (const std::exception& error) {
    link_.fail(error.what());
  }
  sending_.clear();
}

void FetchServer::serve() {
  PollPause pause;
  while (true) {
    std::optional<size_t> slot = slab_.acquire();
    std::optional<Request> request;
    if (slot) request = next(sending_.empty());
    if (request) {
      send(*request, *slot);
    } else if (slot) {
      slab_.release(*slot);
      if (sending_.empty()) return;  // ended
    }
    if (finish_some() || request) {
      pause.reset();
    } else {
      link_.check();
      pause.pause();
    }
  }
}

std::optional<FetchServer::Request> FetchServer::next(bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) changed_.wait(lock, [this] { return ended_ || !requests_.empty(); });
  if (ended_ || requests_.empty()) return std::nullopt;
  Request request = std::move(requests_.front());
  requests_.pop_front();
  return request;
}

void FetchServer::send(const Request& request, size_t slot) {
  size_t bytes = 0;
  try {
    bytes = handler_.gather(request.fetch, slab_.slot(slot), [this] { agent_.progress(); });
  } catch (const Error& error) {
    slab_.release(slot);
    link_.reply(MessageType::kFailure, request.call_id,
                Outcome{error.status(), error.what()}.encode());
    return;
  }
  uint64_t to = target_.addr + request.fetch.slot * kSlotBytes;
  sending_.push_back({request.call_id, slot, agent_.write(slab_.slot(slot), to, bytes),
                      Deadline::after_ms(kWriteTimeoutMs)});
}

bool FetchServer::finish_some() {
  bool some = false;
  for (auto sending = sending_.begin(); sending != sending_.end();) {
    if (!sending->write->done()) {
      if (sending->deadline.passed()) {
        throw Error(Status::kTimeout, "the peer takes no bytes");
      }
      ++sending;
      continue;
    }
    link_.reply(MessageType::kFetched, sending->call_id, {});
    slab_.release(sending->slot);
    sending = sending_.erase(sending);
    some = true;
  }
  return some;
}

}  // namespace llmdd
