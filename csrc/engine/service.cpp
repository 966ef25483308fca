#include "engine/service.h"

#include <algorithm>
#include <string>

#include "engine/copier.h"

namespace llmdd {
namespace {

constexpr uint32_t kMaxPushMs = 10U * 60 * 1000;

void check_stride(uint64_t local, uint64_t peer, bool is_blocks) {
  if (local == peer) return;
  throw Error(Status::kParamInvalid, std::string(is_blocks ? "block size" : "row size") +
                                         " differs: destination " + std::to_string(local) +
                                         " bytes, source has " + std::to_string(peer));
}

void check_runs(const std::vector<BlockRun>& runs, uint64_t rows) {
  for (const BlockRun& run : runs) {
    uint64_t end = 0;
    if (__builtin_add_overflow(run.dst, run.count, &end) || end > rows || run.count == 0) {
      throw Error(Status::kParamInvalid, "destination rows [" + std::to_string(run.dst) + ", " +
                                             std::to_string(end) + ") are outside [0, " +
                                             std::to_string(rows) + ")");
    }
  }
}

TensorRange select_destination(const Push& push, const CacheLayout& layout) {
  TensorRange tensors =
      select_tensors(push.dst_layers, layout.tensor_addrs.size(), push.tensors_per_layer);
  if (tensors.count != push.src_addrs.size()) {
    throw Error(Status::kParamInvalid, "number of tensors differs: destination " +
                                           std::to_string(tensors.count) + ", source has " +
                                           std::to_string(push.src_addrs.size()));
  }
  return tensors;
}

// A pushed row comes as one run; which row it goes to is in the key.
std::vector<BlockRun> place_runs(const Push& push, const CacheLayout& layout) {
  std::vector<BlockRun> runs = push.runs;
  if (!layout.is_blocks) {
    if (runs.size() != 1 || runs[0].count != 1) throw WireError("a row is pushed as one run");
    runs[0].dst = push.target.row;
  }
  check_runs(runs, layout.rows);
  return runs;
}

CopyPlan plan_push(const Push& push, const CacheLayout& layout) {
  if (layout.is_blocks != (push.target.kind == KeyKind::kBlocks)) {
    throw Error(Status::kParamInvalid,
                "a row goes to a contiguous cache and blocks to a blocks cache");
  }
  check_stride(layout.stride, push.stride, layout.is_blocks);
  TensorRange tensors = select_destination(push, layout);
  auto first = layout.tensor_addrs.begin() + tensors.first;
  CopyPlan plan;
  plan.src_bases = push.src_addrs;
  plan.dst_bases.assign(first, first + tensors.count);
  plan.runs = to_bytes(place_runs(push, layout), layout.stride);
  return plan;
}

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

// The puller's bytes count only if the cache and its key existed all the time. In message mode the
// pull of an allocated row uses its key up.
void Service::finish(Link& link, const Frame& request) {
  Finish finish = Finish::decode(request.payload);
  caches_.finish_pull(finish.ref, finish.cache_id, finish.tensors, !remote_access_);
  link.reply(MessageType::kFinished, request.call_id, {});
}

void Service::push(Link& link, const Frame& request) {
  copy_pushed(link, Push::decode(request.payload));
  link.reply(MessageType::kPushed, request.call_id, {});
}

void Service::copy_pushed(Link& link, const Push& push) {
  CacheRef cache_only = push.target;
  cache_only.row = 0;  // a row beyond the cache is another error than a missing cache
  FoundRow found = caches_.find(cache_only);
  if (!remote_access_ || !found.cache->layout.remote_accessible) {
    throw Error(Status::kParamInvalid, "the destination cache is not remote accessible");
  }
  CopyPlan plan = plan_push(push, found.cache->layout);
  Deadline deadline = Deadline::after_ms(std::min(push.timeout_ms, kMaxPushMs));
  CacheUse destination = caches_.use(found.cache);
  copy_from_process(link.peer_pid(), plan, [&] {
    // A source that has given up has closed its end and may reuse its memory.
    link.check();
    destination.check_open();
    if (deadline.passed()) throw Error(Status::kTimeout, "the copy did not finish in time");
  });
  if (link.peer_ended()) throw Error(Status::kFailed, "the source process ended during the copy");
}

void Service::unlink(Link& link, const Frame& request) {
  links_.drop(link);
  link.reply(MessageType::kUnlinked, request.call_id, {});
  link.forget("by the peer");
}

}  // namespace llmdd
