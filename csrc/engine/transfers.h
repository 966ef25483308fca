// The calling side of pulls and pushes, on the API caller's thread.
//
// A pull asks the peer where the cache lies (one message, so what is no longer registered is never
// read), copies, and asks whether the cache was still registered. A push sends the peer the
// addresses of the source; the peer copies and answers.
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

namespace llmdd {

struct EngineOptions {
  uint64_t cluster_id = 0;
  bool remote_access = false;
  int64_t sync_kv_timeout_ms = 1000;
  std::string listen_ip;  // empty: this process only dials
  uint16_t listen_port = 0;
};

// Layer ranges of both sides; no range means all tensors.
struct Layers {
  std::optional<LayerRange> src;
  std::optional<LayerRange> dst;
  uint32_t tensors_per_layer = 2;
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

  // `size` bytes of the remote row into local row `batch_index`; -1 means the local row's size.
  void pull_cache(const Remote& src, int64_t dst_cache_id, uint64_t batch_index, int64_t size,
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
  // Returns when the peer has copied. sync_kv_timeout begins now.
  void finish_push(const Pushing& pushing) const;

 private:
  std::shared_ptr<Cache> destination(const Remote& src, int64_t cache_id,
                                     const Layers& layers) const;
  void check_own_cluster(uint64_t cluster_id) const;
  Deadline deadline() const { return Deadline::after_ms(options_.sync_kv_timeout_ms); }

  Resolved resolve(Link& link, const CacheRef& ref, const CacheLayout& local,
                   const Deadline& deadline) const;
  CopyPlan plan(const Resolved& remote, const CacheLayout& local, const Layers& layers,
                std::vector<ByteRun> runs) const;
  void copy(Link& link, std::shared_ptr<Cache> cache, const CopyPlan& plan,
            const Deadline& deadline) const;
  void finish(Link& link, const Resolved& remote, const Deadline& deadline) const;

  const EngineOptions& options_;
  CacheTable& caches_;
  LinkTable& links_;
};

}  // namespace llmdd
