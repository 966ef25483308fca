// The calling side of pulls and pushes, on the API caller's thread.
//
// A pull asks the peer where the cache lies (one message, so what is no longer registered is never
// read), copies, and says so; the answer tells whether the cache was there all the time. A push
// sends the peer the addresses of the source; the peer copies and answers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "common/clock.h"
#include "engine/cache_table.h"
#include "engine/copier.h"
#include "engine/link_table.h"
#include "engine/messages.h"
#include "engine/push_source.h"
#include "engine/transport.h"

namespace llmdd {

struct EngineOptions {
  uint64_t cluster_id = 0;
  bool remote_access = false;
  int64_t sync_kv_timeout_ms = 1000;
  std::string listen_ip;  // empty: this process only dials
  uint16_t listen_port = 0;
  std::optional<PoolConfig> device_pool;  // for caches that the engine allocates
  std::optional<PoolConfig> host_pool;
  int64_t link_total_time_ms = 120'000;  // of a collective link(), with its retries
  uint32_t link_retries = 1;
  Transport transport = Transport::kAuto;
  std::string link_secret;    // callers over NIXL must know it; empty: anybody may come
  std::string nixl_library;   // path; empty: not installed
  uint32_t staging_mib = 64;  // of each link over NIXL
  bool share_memory = true;   // false: no peer maps this process's memory; it may map theirs
};

// Layer ranges of both sides; no range means all tensors.
struct Layers {
  std::optional<LayerRange> src;
  std::optional<LayerRange> dst;
  uint32_t tensors_per_layer = 2;
};

// Where the bytes of a pulled row begin and end.
struct RowPull {
  uint64_t batch_index = 0;  // the local row
  int64_t size = -1;         // -1: the rest of the local row
  // Bytes into either row. A pull with an offset, even 0, leaves the source's key bound.
  std::optional<uint64_t> src_offset;
  std::optional<uint64_t> dst_offset;

  bool keeps_key() const { return src_offset.has_value() || dst_offset.has_value(); }
};

struct Remote {
  uint64_t cluster_id = 0;
  CacheRef ref;
};

// Where a push goes: the cache that `ref` names in the peer's table, or raw addresses, one for each
// tensor sent. With a token, blocks of the destination are positions in the peer's reservation.
struct PushTarget {
  uint64_t cluster_id = 0;
  CacheRef ref;
  uint64_t token = 0;
  std::vector<uint64_t> addrs;
};

class Transfers {
 public:
  Transfers(const EngineOptions& options, CacheTable& caches, LinkTable& links)
      : options_(options), caches_(caches), links_(links) {}

  void check_link(uint64_t cluster_id);
  void pull_cache(const Remote& src, int64_t dst_cache_id, const RowPull& row,
                  const Layers& layers);
  // Blocks to blocks, or a contiguous row to blocks when `ref` is not of kind kBlocks.
  void pull_blocks(const Remote& src, int64_t dst_cache_id, const std::vector<uint64_t>& src_blocks,
                   const std::vector<uint64_t>& dst_blocks, const Layers& layers);
  void push_cache(const Remote& dst, int64_t src_cache_id, uint64_t src_batch_index,
                  const Layers& layers);
  void push_blocks(const PushTarget& dst, int64_t src_cache_id,
                   const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                   const Layers& layers);

  // The cache a push starts from, checked as far as `dst` allows.
  std::shared_ptr<Cache> source(const PushTarget& dst, int64_t cache_id) const;
  // A push the peer was asked for.
  struct Pushing {
    std::shared_ptr<Link> link;
    std::shared_ptr<Cache> source;
    Link::Sent sent;
  };
  Pushing start_push(const PushTarget& dst, std::shared_ptr<Cache> source, const Layers& layers,
                     const PushSource& from) const;
  // Returns when the peer has copied. sync_kv_timeout begins now. A caller that has nothing else to
  // send may have the answer looked for.
  void finish_push(const Pushing& pushing, bool looks = false) const;

 private:
  std::shared_ptr<Cache> destination(const Remote& src, int64_t cache_id,
                                     const Layers& layers) const;
  void check_own_cluster(uint64_t cluster_id) const;
  Deadline deadline() const { return Deadline::after_ms(options_.sync_kv_timeout_ms); }

  Resolved resolve(Link& link, const CacheRef& ref, const CacheLayout& local,
                   const Deadline& deadline) const;
  CopyPlan plan(const Resolved& remote, const CacheLayout& local, const Layers& layers,
                std::vector<ByteRun> runs) const;
  void copy(Link& link, std::shared_ptr<Cache> cache, CopyPlan plan,
            const Deadline& deadline) const;
  void finish(Link& link, const CacheRef& ref, const Resolved& remote, const TensorRange& used,
              const Deadline& deadline) const;

  const EngineOptions& options_;
  CacheTable& caches_;
  LinkTable& links_;
};

}  // namespace llmdd
