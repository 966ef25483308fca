// The links of this process by cluster id.
//
// A record is LINKING while this process dials, then holds the Link until it is unlinked. Two
// processes may dial each other at the same moment; exactly one link survives, decided in `accept`
// (see there).
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/status.h"
#include "engine/link.h"

namespace llmdd {

class LinkTable;

// The LINKING record of one dial. Removes it unless the dial ended in a link.
class LinkReservation {
 public:
  LinkReservation(LinkTable& table, uint64_t cluster_id);
  LinkReservation(const LinkReservation&) = delete;
  LinkReservation& operator=(const LinkReservation&) = delete;
  ~LinkReservation();

  // Announces that the next message makes the peer take the link. Throws Error(kAlreadyLink) when
  // the peer's own dial has been accepted meanwhile.
  void confirm();
  void commit(std::shared_ptr<Link> link);

 private:
  LinkTable& table_;
  const uint64_t cluster_id_;
  const uint64_t ticket_;
};

class LinkTable {
 public:
  explicit LinkTable(uint64_t own_cluster_id) : own_cluster_id_(own_cluster_id) {}

  // Files a link that the peer dialled. Throws Error(kAlreadyLink) when there is a live one, or
  // when both sides have confirmed their dials and ours is the one that stays (the lower cluster
  // id's). A failed link of the same cluster is replaced: its peer has dialled anew. Links that a
  // peer had dialled whose process has ended leave the table: nobody here would unlink them, and a
  // restarted process is another cluster.
  void accept(const std::shared_ptr<Link>& link);

  // Starts a link that is filed here; if its thread does not start, it leaves the table. Throws
  // Error(kLinkFailed).
  void start(Link& link);

  // Throws Error(kNotYetLink).
  std::shared_ptr<Link> require(uint64_t cluster_id) const;
  // Empty when there is none.
  std::shared_ptr<Link> find(uint64_t cluster_id) const;
  // Removes the record of this very link; empty when it is gone already.
  std::shared_ptr<Link> take(const Link& link);
  // The peer asked to unlink. Called on the link's own thread, so joining is left to `reap`.
  void drop(const Link& link);

  // Joins the threads of links that have ended and left the table.
  void reap();
  void close_all(const std::string& reason);
  size_t size() const;
  // Tells every peer that a file is shared no more.
  void withdraw(uint64_t file_id) const;

 private:
  friend class LinkReservation;
  struct Record {
    uint64_t ticket = 0;  // of the dial in progress
    bool confirmed = false;
    bool accepted = false;  // the peer dialled
    std::shared_ptr<Link> link;
  };

  std::shared_ptr<Link> take_locked(const Link& link);
  uint64_t reserve(uint64_t cluster_id);
  void confirm(uint64_t cluster_id, uint64_t ticket);
  void commit(uint64_t cluster_id, uint64_t ticket, std::shared_ptr<Link> link);
  void release(uint64_t cluster_id, uint64_t ticket);
  Record* reserved_locked(uint64_t cluster_id, uint64_t ticket);
  void check_room_locked() const;
  void retire_dead_locked();

  const uint64_t own_cluster_id_;
  mutable std::mutex mutex_;
  uint64_t next_ticket_ = 1;
  std::map<uint64_t, Record> records_;
  std::vector<std::shared_ptr<Link>> retired_;
};

}  // namespace llmdd
