#include "engine/service.h"

#include <string>

namespace llmdd {
namespace {

Resolved describe(const FoundRow& found) {
  const CacheLayout& layout = found.cache->layout;
  return {found.cache->id,    found.row,          layout.rows,
          layout.stride,      layout.is_blocks,   layout.remote_accessible,
          layout.host_placed, layout.tensor_addrs};
}

}  // namespace

void Service::handle(Link& link, const Frame& request) {
  try {
    answer(link, request);
  } catch (const Error& error) {
    link.reply(MessageType::kFailure, request.call_id,
               Outcome{error.status(), error.what()}.encode());
  }
}

void Service::answer(Link& link, const Frame& request) {
  switch (request.type) {
    case MessageType::kResolve:
      return resolve(link, request);
    case MessageType::kFinish:
      return finish(link, request);
    case MessageType::kPush:
      return push(link, request);
    default:
      return unlink(link, request);
  }
}

void Service::resolve(Link& link, const Frame& request) {
  FoundRow found = caches_.find(Resolve::decode(request.payload).ref);
  link.reply(MessageType::kResolved, request.call_id, describe(found).encode());
}

// The puller's bytes count only if the cache was registered all the time.
void Service::finish(Link& link, const Frame& request) {
  int64_t cache_id = Finish::decode(request.payload).cache_id;
  if (!caches_.contains(cache_id)) {
    throw Error(Status::kKvCacheNotExist,
                "cache " + std::to_string(cache_id) + " was unregistered during the pull");
  }
  link.reply(MessageType::kFinished, request.call_id, {});
}

void Service::push(Link& link, const Frame& request) {
  receiver_.copy(link, Push::decode(request.payload));
  link.reply(MessageType::kPushed, request.call_id, {});
}

void Service::unlink(Link& link, const Frame& request) {
  links_.drop(link);
  link.reply(MessageType::kUnlinked, request.call_id, {});
  link.forget("by the peer");
}

}  // namespace llmdd
