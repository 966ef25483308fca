#include "engine/service.h"

#include <string>

#include "engine/slot_copies.h"

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

// The caches are held as long as it takes to read them: what is unregistered meanwhile may be
// unmapped right after.
size_t Service::gather(const Fetch& fetch, uint8_t* to, const std::function<void()>& meanwhile) {
  std::vector<CacheUse> uses;
  CacheMemory memory = CacheMemory::kMapped;
  std::shared_ptr<Cache> last;
  for (const Fetch::Piece& piece : fetch.pieces) {
    if (last && contains_bytes(last->layout, piece.addr, piece.length)) continue;
    last = caches_.readable(piece.addr, piece.length);
    if (remote_access_ && !last->layout.remote_accessible) {
      throw Error(Status::kParamInvalid, "the source cache is not remote accessible");
    }
    uses.push_back(caches_.use(last));
    if (!last->shared.mapped()) memory = CacheMemory::kUnknown;
  }
  return llmdd::gather(fetch.pieces, to, memory, meanwhile);
}

void Service::answer(Link& link, const Frame& request) {
  switch (request.type) {
    case MessageType::kResolve:
      return resolve(link, request);
    case MessageType::kFinish:
      return finish(link, request);
    case MessageType::kPush:
      return push(link, request);
    case MessageType::kUnlink:
      return unlink(link, request);
    default:
      throw WireError("a fetch on a link whose peers read by themselves");
  }
}

void Service::resolve(Link& link, const Frame& request) {
  // The row is let go before the peer is answered: its memory may be given back right after.
  Bytes answer;
  {
    FoundRow found = caches_.find(Resolve::decode(request.payload).ref);
    link.offer(found.cache->shared.files());
    answer = describe(found).encode();
  }
  link.reply(MessageType::kResolved, request.call_id, answer);
}

// The puller's bytes count only if the cache and its key existed all the time. In message mode the
// pull of an allocated row uses its key up.
void Service::finish(Link& link, const Frame& request) {
  Finish finish = Finish::decode(request.payload);
  caches_.finish_pull(finish.ref, finish.cache_id, finish.tensors, !remote_access_);
  link.reply(MessageType::kFinished, request.call_id, {});
}

void Service::push(Link& link, const Frame& request) {
  receiver_.copy(link, Push::decode(request.payload));
  link.reply(MessageType::kPushed, request.call_id, {});
}

void Service::unlink(Link& link, const Frame& request) {
  links_.drop(link);
  link.part();
  link.reply(MessageType::kUnlinked, request.call_id, {});
  link.forget("by the peer");
}

}  // namespace llmdd
