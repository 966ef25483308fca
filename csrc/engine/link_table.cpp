#include "engine/link_table.h"

#include <algorithm>

namespace llmdd {
namespace {

constexpr size_t kMaxLinks = 512;

[[noreturn]] void throw_already(const char* why) { throw Error(Status::kAlreadyLink, why); }

}  // namespace

LinkReservation::LinkReservation(LinkTable& table, uint64_t cluster_id)
    : table_(table), cluster_id_(cluster_id), ticket_(table.reserve(cluster_id)) {}

LinkReservation::~LinkReservation() { table_.release(cluster_id_, ticket_); }

void LinkReservation::confirm() { table_.confirm(cluster_id_, ticket_); }

void LinkReservation::commit(std::shared_ptr<Link> link) {
  table_.commit(cluster_id_, ticket_, std::move(link));
}

uint64_t LinkTable::reserve(uint64_t cluster_id) {
  std::lock_guard lock(mutex_);
  if (records_.count(cluster_id) != 0) {
    throw_already("there is a link already, unlink_clusters removes it");
  }
  check_room_locked();
  uint64_t ticket = next_ticket_++;
  records_[cluster_id].ticket = ticket;
  return ticket;
}

void LinkTable::check_room_locked() const {
  if (records_.size() >= kMaxLinks) {
    throw Error(Status::kParamInvalid,
                "this process has its " + std::to_string(kMaxLinks) + " links; unlink one first");
  }
}

LinkTable::Record* LinkTable::reserved_locked(uint64_t cluster_id, uint64_t ticket) {
  auto found = records_.find(cluster_id);
  bool mine = found != records_.end() && !found->second.link && found->second.ticket == ticket;
  return mine ? &found->second : nullptr;
}

void LinkTable::confirm(uint64_t cluster_id, uint64_t ticket) {
  std::lock_guard lock(mutex_);
  Record* record = reserved_locked(cluster_id, ticket);
  if (record == nullptr) throw_already("the peer has linked to this process meanwhile");
  record->confirmed = true;
}

void LinkTable::commit(uint64_t cluster_id, uint64_t ticket, std::shared_ptr<Link> link) {
  std::lock_guard lock(mutex_);
  Record* record = reserved_locked(cluster_id, ticket);
  if (record == nullptr) throw_already("the peer has linked to this process meanwhile");
  record->link = std::move(link);
}

void LinkTable::release(uint64_t cluster_id, uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (reserved_locked(cluster_id, ticket) != nullptr) records_.erase(cluster_id);
}

void LinkTable::accept(const std::shared_ptr<Link>& link) {
  uint64_t cluster_id = link->cluster_id();
  std::lock_guard lock(mutex_);
  retire_dead_locked();
  auto found = records_.find(cluster_id);
  if (found == records_.end()) {
    check_room_locked();
  } else if (found->second.link) {
    if (!found->second.link->hung_up()) {
      throw_already("a live process holds a link under this cluster id");
    }
    retired_.push_back(found->second.link);
  } else if (found->second.confirmed && own_cluster_id_ < cluster_id) {
    throw_already("this process is completing its own link to the peer");
  }
  records_[cluster_id] = Record{0, false, true, link};
}

void LinkTable::start(Link& link) {
  try {
    link.start();
  } catch (const Error& error) {
    link.forget(error.what());
    drop(link);
    throw;
  }
}

void LinkTable::retire_dead_locked() {
  for (auto it = records_.begin(); it != records_.end();) {
    const Record& record = it->second;
    if (record.accepted && !record.link->collective() && record.link->peer_ended()) {
      retired_.push_back(record.link);
      it = records_.erase(it);
    } else {
      ++it;
    }
  }
}

std::shared_ptr<Link> LinkTable::find(uint64_t cluster_id) const {
  std::lock_guard lock(mutex_);
  auto found = records_.find(cluster_id);
  return found == records_.end() ? nullptr : found->second.link;
}

std::shared_ptr<Link> LinkTable::require(uint64_t cluster_id) const {
  std::shared_ptr<Link> link = find(cluster_id);
  if (!link) {
    throw Error(Status::kNotYetLink, "cluster " + std::to_string(cluster_id) +
                                         " is not linked; call link_clusters first");
  }
  if (link->held()) {
    throw Error(Status::kNotYetLink,
                "cluster " + std::to_string(cluster_id) +
                    ": the other members of this link() are not ready yet; wait until "
                    "query_register_mem_status says OK");
  }
  return link;
}

std::shared_ptr<Link> LinkTable::take_locked(const Link& link) {
  auto found = records_.find(link.cluster_id());
  if (found == records_.end() || found->second.link.get() != &link) return nullptr;
  std::shared_ptr<Link> taken = std::move(found->second.link);
  records_.erase(found);
  return taken;
}

std::shared_ptr<Link> LinkTable::take(const Link& link) {
  std::lock_guard lock(mutex_);
  return take_locked(link);
}

void LinkTable::drop(const Link& link) {
  std::lock_guard lock(mutex_);
  if (std::shared_ptr<Link> taken = take_locked(link)) retired_.push_back(std::move(taken));
}

void LinkTable::reap() {
  std::vector<std::shared_ptr<Link>> done;
  {
    std::lock_guard lock(mutex_);
    auto first_done = std::stable_partition(retired_.begin(), retired_.end(),
                                            [](const auto& link) { return !link->thread_done(); });
    done.assign(std::make_move_iterator(first_done), std::make_move_iterator(retired_.end()));
    retired_.erase(first_done, retired_.end());
  }
  for (const auto& link : done) link->join();
}

void LinkTable::close_all(const std::string& reason) {
  std::vector<std::shared_ptr<Link>> all;
  {
    std::lock_guard lock(mutex_);
    all = std::move(retired_);
    retired_.clear();
    for (auto& [cluster_id, record] : records_) {
      if (record.link) all.push_back(std::move(record.link));
    }
    records_.clear();
  }
  for (const auto& link : all) link->forget(reason);
  for (const auto& link : all) link->join();
}

size_t LinkTable::size() const {
  std::lock_guard lock(mutex_);
  return records_.size();
}

void LinkTable::withdraw(uint64_t file_id) const {
  std::vector<std::shared_ptr<Link>> links;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [cluster_id, record] : records_) {
      if (record.link) links.push_back(record.link);
    }
  }
  for (const auto& link : links) link->withdraw(file_id);
}

}  // namespace llmdd
