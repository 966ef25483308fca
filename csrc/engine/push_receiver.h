// The destination of a push: checks the request against this process's own tables and copies, on
// the thread of the link it came on.
#pragma once

#include <memory>
#include <vector>

#include "engine/cache_table.h"
#include "engine/copier.h"
#include "engine/link.h"
#include "engine/messages.h"
#include "engine/reservation_table.h"

namespace llmdd {

class PushReceiver {
 public:
  PushReceiver(CacheTable& caches, ReservationTable& reservations, bool remote_access)
      : caches_(caches), reservations_(reservations), remote_access_(remote_access) {}

  // Returns when all bytes are there. Throws Error; then some of them may have been copied, but
  // never one that the request and the tables do not both allow.
  void copy(Link& link, const Push& push);

 private:
  struct Plan {
    CopyPlan copy;
    std::vector<std::shared_ptr<Cache>> caches;  // those that are written
  };

  Plan plan(const Push& push, const Reservation* reservation) const;
  Plan plan_by_key(const Push& push, const Reservation* reservation) const;
  Plan plan_by_address(const Push& push) const;
  void run(Link& link, const Push& push, const Reservation* reservation);

  CacheTable& caches_;
  ReservationTable& reservations_;
  const bool remote_access_;
};

}  // namespace llmdd
