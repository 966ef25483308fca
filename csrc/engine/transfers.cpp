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
  TensorRange src =
      select_tensors(layers.src, remote.tensor_addrs.size(), layers.tensors_per_layer);
  TensorRange dst = select_tensors(layers.dst, local.tensor_addrs.size(), layers.tensors_per_layer);
  check_equal("number of tensors", dst.count, src.count);
  return {selected(remote.tensor_addrs, src), selected(local.tensor_addrs, dst), std::move(runs)};
}

void Transfers::copy(Link& link, std::shared_ptr<Cache> cache, const CopyPlan& plan,
                     const Deadline& deadline) const {
  CacheUse use = caches_.use(std::move(cache));
  copy_from_process(link.peer_pid(), plan, [&] {
    link.check();
    use.check_open();
    if (!deadline.passed()) return;
    link.fail("a copy did not finish in time");
    throw Error(Status::kTimeout, "the copy did not finish within sync_kv_timeout");
  });
}

// The answer also proves that the process that was read is the one that was linked.
void Transfers::finish(Link& link, const CacheRef& ref, const Resolved& remote,
                       const Layers& layers, const Deadline& deadline) const {
  TensorRange tensors =
      select_tensors(layers.src, remote.tensor_addrs.size(), layers.tensors_per_layer);
  link.call(MessageType::kFinish, Finish{ref, remote.cache_id, tensors}.encode(), deadline);
}

void Transfers::pull_cache(const Remote& src, int64_t dst_cache_id, uint64_t batch_index,
                           int64_t size, const Layers& layers) {
  std::shared_ptr<Cache> cache = destination(src, dst_cache_id, layers);
  const CacheLayout& local = cache->layout;
  check_below("batch_index", batch_index, local.rows);
  uint64_t bytes = size < 0 ? local.stride : static_cast<uint64_t>(size);
  if (bytes > local.stride) {
    invalid("size " + std::to_string(bytes) + " is over the row's " + std::to_string(local.stride));
  }
  std::shared_ptr<Link> link = links_.require(src.cluster_id);
  Deadline until = deadline();
  Resolved remote = resolve(*link, src.ref, local, until);
  if (bytes > remote.stride) {
    invalid("size " + std::to_string(bytes) + " is over the source row's " +
            std::to_string(remote.stride));
  }
  ByteRun row{remote.row * remote.stride, batch_index * local.stride, bytes};
  copy(*link, cache, plan(remote, local, layers, {row}), until);
  finish(*link, src.ref, remote, layers, until);
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
  finish(*link, src.ref, remote, layers, until);
}

void Transfers::push_cache(const Remote& dst, int64_t src_cache_id, uint64_t src_batch_index,
                           const Layers& layers) {
  check_own_cluster(dst.cluster_id);
  std::shared_ptr<Cache> source = caches_.get(src_cache_id);
  check_below("src_batch_index", src_batch_index, source->layout.rows);
  push(dst, *source, layers, {{src_batch_index, dst.ref.row, 1}});
}

void Transfers::push_blocks(const Remote& dst, int64_t src_cache_id,
                            const std::vector<uint64_t>& src_blocks,
                            const std::vector<uint64_t>& dst_blocks, const Layers& layers) {
  check_own_cluster(dst.cluster_id);
  std::shared_ptr<Cache> source = caches_.get(src_cache_id);
  if (src_blocks.empty()) invalid("src_blocks is empty");
  check_equal("number of blocks", dst_blocks.size(), src_blocks.size());
  check_indices(src_blocks, source->layout.rows, "source");
  push(dst, *source, layers, merge_blocks(src_blocks, dst_blocks));
}

void Transfers::push(const Remote& dst, const Cache& source, const Layers& layers,
                     std::vector<BlockRun> runs) {
  if (!options_.remote_access) invalid("a push needs enable_remote_cache_accessible = True");
  const CacheLayout& layout = source.layout;
  if (!layout.remote_accessible) invalid("the source cache is not remote accessible");
  TensorRange tensors =
      select_tensors(layers.src, layout.tensor_addrs.size(), layers.tensors_per_layer);
  if (runs.size() > kMaxRuns) {
    invalid(std::to_string(runs.size()) + " separate runs of blocks in one push, at most " +
            std::to_string(kMaxRuns) + " are possible; push in several calls");
  }
  std::shared_ptr<Link> link = links_.require(dst.cluster_id);
  Push push{dst.ref,
            layout.stride,
            static_cast<uint32_t>(options_.sync_kv_timeout_ms),
            layers.dst,
            layers.tensors_per_layer,
            selected(layout.tensor_addrs, tensors),
            std::move(runs)};
  link->call(MessageType::kPush, push.encode(), deadline());
  source.check_open();  // else the peer may have copied what is no longer the cache
}

}  // namespace llmdd
