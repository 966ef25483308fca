#include "engine/comm_table.h"

#include <algorithm>
#include <string>

namespace llmdd {
namespace {

constexpr size_t kMaxComms = 512;

[[noreturn]] void throw_unknown(int64_t comm_id) {
  throw Error(Status::kNotYetLink, "comm id " + std::to_string(comm_id) + " is unknown");
}

}  // namespace

int64_t CommTable::link(CommSpec spec) {
  uint64_t own = context_.identity.cluster_id;
  bool member = std::any_of(spec.members.begin(), spec.members.end(),
                            [own](const auto& entry) { return entry.first == own; });
  if (!member) {
    throw Error(Status::kParamInvalid,
                "cluster_rank_info does not name this process's cluster " + std::to_string(own));
  }
  std::lock_guard lock(mutex_);
  if (comms_.size() >= kMaxComms) {
    throw Error(Status::kParamInvalid,
                "this process has its " + std::to_string(kMaxComms) + " comms; unlink one first");
  }
  int64_t id = next_id_++;
  comms_[id] = std::make_unique<Communicator>(context_, std::move(spec));
  return id;
}

CommState CommTable::state(int64_t comm_id) const {
  std::lock_guard lock(mutex_);
  auto found = comms_.find(comm_id);
  if (found == comms_.end()) throw_unknown(comm_id);
  return found->second->state();
}

void CommTable::unlink(int64_t comm_id) {
  std::unique_ptr<Communicator> ended;
  {
    std::lock_guard lock(mutex_);
    auto found = comms_.find(comm_id);
    if (found == comms_.end()) throw_unknown(comm_id);
    ended = std::move(found->second);
    comms_.erase(found);
  }
  ended->cancel();
  drop_links(*ended);
}

bool CommTable::used(const Link& link) const {
  std::lock_guard lock(mutex_);
  return std::any_of(comms_.begin(), comms_.end(),
                     [&link](const auto& comm) { return comm.second->uses(link); });
}

void CommTable::drop_links(const Communicator& ended) {
  for (const auto& link : ended.links()) {
    if (!link->collective() || used(*link)) continue;
    link->forget("by this process");
    if (context_.links.take(*link)) link->join();
  }
}

void CommTable::close_all() {
  std::map<int64_t, std::unique_ptr<Communicator>> all;
  {
    std::lock_guard lock(mutex_);
    all.swap(comms_);
  }
  for (auto& [id, comm] : all) comm->cancel();
}

bool CommTable::empty() const {
  std::lock_guard lock(mutex_);
  return comms_.empty();
}

}  // namespace llmdd
