#include "engine/transfers.h"

#include <string>

namespace llmdd {
namespace {

// A push of more runs than this does not fit one message.
constexpr size_t kMaxRuns = 1'000'000;

[[noreturn]] void invalid(const std::string& text) { throw Error(Status::kParamInvalid, text); }

void check_equal(const char* what, uint64_t destination, uint64_t source) {
  if (destination == source) return;
  invalid(std::string(what) + " differs: destination " + std::to_string(destination) +
          ", source has " + std::to_string(source));
}

void check_below(const char* what, uint64_t value, uint64_t bound) {
  if (value < bound) return;
  invalid(std::string(what) + " " + std::to_string(value) + " is outside [0, " +
          std::to_string(bound) + ")");
}

// A wrong reply breaks the link, not the process.
template <typename Message>
Message decode_reply(Link& link, const Frame& frame) {
  try {
    return Message::decode(frame.payload);
  } catch (const WireError& error) {
    link.fail(error.what());
    throw Error(Status::kFailed, error.what());
  }
}

std::vector<uint64_t> selected(const std::vector<uint64_t>& addrs, const TensorRange& tensors) {
  auto first = addrs.begin() + tensors.first;
  return {first, first + tensors.count};
}

// The bytes of a piece of a row; a size of -1 means the rest of the row.
uint64_t piece_size(const char* side, int64_t size, uint64_t offset, uint64_t stride) {
  if (offset < stride) {
    uint64_t rest = stride - offset;
    uint64_t bytes = size < 0 ? rest : static_cast<uint64_t>(size);
    if (bytes <= rest) return bytes;
  }
  invalid("size " + std::to_string(size) + " from offset " + std::to_string(offset) +
          " is over the " + side + " row's " + std::to_string(stride) + " bytes");
}

TensorRange source_tensors(const Resolved& remote, const Layers& layers) {
  return select_tensors(layers.src, remote.tensor_addrs.size(), layers.tensors_per_layer);
}

}  // namespace

void Transfers::check_own_cluster(uint64_t cluster_id) const {
  if (cluster_id == options_.cluster_id) {
    invalid("cluster " + std::to_string(cluster_id) + " is this process itself");
  }
}

std::shared_ptr<Cache> Transfers::destination(const Remote& src, int64_t cache_id,
                                              const Layers& layers) const {
  check_own_cluster(src.cluster_id);
  std::shared_ptr<Cache> cache = caches_.get(cache_id);
  const CacheLayout& layout = cache->layout;
  select_tensors(layers.dst, layout.tensor_addrs.size(), layers.tensors_per_layer);
  if (options_.remote_access && !layout.remote_accessible) {
    invalid("cache " + std::to_string(cache_id) + " is not remote accessible");
  }
  return cache;
}

Resolved Transfers::resolve(Link& link, const CacheRef& ref, const CacheLayout& local,
                            const Deadline& deadline) const {
  Frame reply = link.call(MessageType::kResolve, Resolve{ref}.encode(), deadline);
  Resolved remote = decode_reply<Resolved>(link, reply);
  if (options_.remote_access && !remote.remote_accessible) {
    invalid("the source cache is not remote accessible");
  }
  if (!options_.remote_access && remote.host_placed && local.host_placed) {
    throw Error(Status::kFeatureNotEnabled,
                "host to host needs enable_remote_cache_accessible = True");
  }
  if (remote.is_blocks != (ref.kind == KeyKind::kBlocks)) {
    invalid("the source is a blocks cache, name it with a BlocksCacheKey");
  }
  return remote;
}

CopyPlan Transfers::plan(const Resolved& remote, const CacheLayout& local, const Layers& layers,
                         std::vector<ByteRun> runs) const {
  TensorRange src = source_tensors(remote, layers);
  TensorRange dst = select_tensors(layers.dst, local.tensor_addrs.size(), layers.tensors_per_layer);
  check_equal("number of tensors", dst.count, src.count);
  return {selected(remote.tensor_addrs, src), selected(local.tensor_addrs, dst), std::move(runs)};
}

void Transfers::copy(Link& link, std::shared_ptr<Cache> cache, CopyPlan plan,
                     const Deadline& deadline) const {
  plan.dst_mapped = cache->shared.mapped();
  CacheUse use = caches_.use(std::move(cache));
  link.peer_memory().copy(plan, [&] {
    link.check();
    use.check_open();
    if (!deadline.passed()) return;
    link.fail("a copy did not finish in time");
    throw Error(Status::kTimeout, "the copy did not finish within sync_kv_timeout");
  });
}

// The answer also proves that the process that was read is the one that was linked.
void Transfers::finish(Link& link, const CacheRef& ref, const Resolved& remote,
                       const TensorRange& used, const Deadline& deadline) const {
  link.call(MessageType::kFinish, Finish{ref, remote.cache_id, used}.encode(), deadline);
}

// Asks for a cache that cannot exist: any other answer than that, and silence, are failures.
void Transfers::check_link(uint64_t cluster_id) {
  std::shared_ptr<Link> link = links_.require(cluster_id);
  try {
    link->call(MessageType::kResolve, Resolve{{KeyKind::kIdAndIndex, 0, 0, 0}}.encode(),
               deadline());
  } catch (const Error& error) {
    if (error.status() != Status::kKvCacheNotExist) throw;
  }
}

void Transfers::pull_cache(const Remote& src, int64_t dst_cache_id, const RowPull& row,
                           const Layers& layers) {
  std::shared_ptr<Cache> cache = destination(src, dst_cache_id, layers);
  const CacheLayout& local = cache->layout;
  check_below("batch_index", row.batch_index, local.rows);
  uint64_t dst_offset = row.dst_offset.value_or(0);
  uint64_t src_offset = row.src_offset.value_or(0);
  uint64_t bytes = piece_size("destination", row.size, dst_offset, local.stride);
  std::shared_ptr<Link> link = links_.require(src.cluster_id);
  Deadline until = deadline();
  Resolved remote = resolve(*link, src.ref, local, until);
  piece_size("source", static_cast<int64_t>(bytes), src_offset, remote.stride);
  ByteRun run{remote.row * remote.stride + src_offset, row.batch_index * local.stride + dst_offset,
              bytes};
  copy(*link, cache, plan(remote, local, layers, {run}), until);
  TensorRange used = row.keeps_key() ? TensorRange{} : source_tensors(remote, layers);
  finish(*link, src.ref, remote, used, until);
}

void Transfers::pull_blocks(const Remote& src, int64_t dst_cache_id,
                            const std::vector<uint64_t>& src_blocks,
                            const std::vector<uint64_t>& dst_blocks, const Layers& layers) {
  std::shared_ptr<Cache> cache = destination(src, dst_cache_id, layers);
  const CacheLayout& local = cache->layout;
  std::shared_ptr<Link> link = links_.require(src.cluster_id);
  bool from_blocks = src.ref.kind == KeyKind::kBlocks;
  if (from_blocks) check_equal("number of blocks", dst_blocks.size(), src_blocks.size());
  check_indices(dst_blocks, local.rows, "destination");

  Deadline until = deadline();
  Resolved remote = resolve(*link, src.ref, local, until);
  std::vector<ByteRun> runs;
  if (from_blocks) {
    check_equal("block size", local.stride, remote.stride);
    check_indices(src_blocks, remote.rows, "source");
    runs = to_bytes(merge_blocks(src_blocks, dst_blocks), local.stride);
  } else {
    runs = row_to_blocks(remote.row * remote.stride, remote.stride, local.stride, dst_blocks);
  }
  copy(*link, cache, plan(remote, local, layers, std::move(runs)), until);
  finish(*link, src.ref, remote, source_tensors(remote, layers), until);
}

std::shared_ptr<Cache> Transfers::source(const PushTarget& dst, int64_t cache_id) const {
  check_own_cluster(dst.cluster_id);
  std::shared_ptr<Cache> cache = caches_.get(cache_id);
  if (dst.addrs.empty() && !cache->layout.remote_accessible) {
    invalid("cache " + std::to_string(cache_id) + " is not remote accessible");
  }
  return cache;
}

void Transfers::push_cache(const Remote& dst, int64_t src_cache_id, uint64_t src_batch_index,
                           const Layers& layers) {
  PushTarget target{dst.cluster_id, dst.ref, 0, {}};
  std::shared_ptr<Cache> cache = source(target, src_cache_id);
  finish_push(start_push(target, cache, layers, row_source(cache->layout, src_batch_index)));
}

void Transfers::push_blocks(const PushTarget& dst, int64_t src_cache_id,
                            const std::vector<uint64_t>& src_blocks,
                            const std::vector<uint64_t>& dst_blocks, const Layers& layers) {
  std::shared_ptr<Cache> cache = source(dst, src_cache_id);
  finish_push(start_push(dst, cache, layers, blocks_source(cache->layout, src_blocks, dst_blocks)));
}

Transfers::Pushing Transfers::start_push(const PushTarget& dst, std::shared_ptr<Cache> source,
                                         const Layers& layers, const PushSource& from) const {
  if (dst.addrs.empty() && !options_.remote_access) {
    invalid("a push needs enable_remote_cache_accessible = True");
  }
  const CacheLayout& layout = source->layout;
  TensorRange tensors =
      select_tensors(layers.src, layout.tensor_addrs.size(), layers.tensors_per_layer);
  if (from.runs.size() > kMaxRuns) {
    invalid(std::to_string(from.runs.size()) + " separate runs of blocks in one push, at most " +
            std::to_string(kMaxRuns) + " are possible; push in several calls");
  }
  std::shared_ptr<Link> link = links_.require(dst.cluster_id);
  Push push;
  push.target = dst.ref;
  push.dst_layers = layers.dst;
  push.tensors_per_layer = layers.tensors_per_layer;
  push.token = dst.token;
  push.dst_addrs = dst.addrs;
  push.to_blocks = from.to_blocks;
  push.src_bytes = from.bytes;
  push.block_bytes = from.block_bytes;
  push.timeout_ms = static_cast<uint32_t>(options_.sync_kv_timeout_ms);
  push.src_addrs = selected(layout.tensor_addrs, tensors);
  for (uint64_t& addr : push.src_addrs) addr += from.offset;
  push.runs = from.runs;
  link->offer(source->shared.files());
  Link::Sent sent = link->start(MessageType::kPush, push.encode());
  return {std::move(link), std::move(source), std::move(sent)};
}

void Transfers::finish_push(const Pushing& pushing, bool looks) const {
  try {
    if (looks) pushing.link->look(pushing.sent);
    pushing.link->finish(pushing.sent, deadline());
  } catch (const Error& error) {
    // Also when the peer was the first to notice.
    if (error.status() == Status::kTimeout) pushing.link->fail("a push did not finish in time");
    throw;
  }
  pushing.source->check_open();  // else the peer may have copied what is no longer the cache
}

}  // namespace llmdd
