// Answers what peers ask, on the thread of the link they ask on.
//
// As the source of a pull it tells where a cache lies, and for a peer that cannot read by itself it
// gathers registered bytes; as the destination of a push it checks the request against this
// process's own cache table and copies by itself, so no peer ever writes into a cache.
#pragma once

#include "engine/cache_table.h"
#include "engine/link.h"
#include "engine/link_table.h"
#include "engine/push_receiver.h"

namespace llmdd {

class Service : public RequestHandler {
 public:
  Service(CacheTable& caches, ReservationTable& reservations, LinkTable& links, bool remote_access)
      : caches_(caches),
        links_(links),
        receiver_(caches, reservations, remote_access),
        remote_access_(remote_access) {}

  void handle(Link& link, const Frame& request) override;
  size_t gather(const Fetch& fetch, uint8_t* to, const std::function<void()>& meanwhile) override;

 private:
  void answer(Link& link, const Frame& request);
  void resolve(Link& link, const Frame& request);
  void finish(Link& link, const Frame& request);
  void push(Link& link, const Frame& request);
  void unlink(Link& link, const Frame& request);

  CacheTable& caches_;
  LinkTable& links_;
  PushReceiver receiver_;
  const bool remote_access_;
};

}  // namespace llmdd
