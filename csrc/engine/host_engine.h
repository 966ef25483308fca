// The engine of one process: its caches, its links and their threads.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/signal_fd.h"
#include "engine/acceptor.h"
#include "engine/cache_table.h"
#include "engine/comm_table.h"
#include "engine/copy_threads.h"
#include "engine/handshake.h"
#include "engine/layer_task.h"
#include "engine/link_table.h"
#include "engine/local_copies.h"
#include "engine/memory_pool.h"
#include "engine/reservation_table.h"
#include "engine/service.h"
#include "engine/transfers.h"

namespace llmdd {

// Every call may come from any thread. After `finalize` they throw Error(kFailed), and so they do
// in a forked child: threads do not survive a fork.
class HostEngine {
 public:
  explicit HostEngine(const EngineOptions& options);
  HostEngine(const HostEngine&) = delete;
  HostEngine& operator=(const HostEngine&) = delete;
  ~HostEngine();

  // Ends all links and waits for calls in progress, which fail.
  void finalize();
  // True in a forked child, where the engine must not be destroyed: its threads do not exist.
  bool foreign() const;

  uint16_t listen_port() const;
  // Listens there from now on, or nowhere if `ip` is empty. Throws Error(kExistLink) while there is
  // a link.
  void listen(const std::string& ip, uint16_t port);

  int64_t register_cache(const CacheSpec& spec, const std::vector<RowKey>& keys);
  int64_t register_blocks_cache(const CacheSpec& spec, std::optional<uint64_t> model_id);
  void unregister_cache(int64_t cache_id);

  // Caches in the engine's own memory. All throw Error(kFeatureNotEnabled) without a pool.
  Allocated allocate_cache(const CacheSpec& spec, size_t num_tensors,
                           const std::vector<RowKey>& keys,
                           std::optional<uint64_t> blocks_model_id);
  void deallocate_cache(int64_t cache_id);
  void remove_cache_key(const RowKey& key);
  // Bytes in use in the pool of a placement.
  uint64_t pool_used_bytes(bool host_placed) const;

  // One status per target, in order; up to 16 dials run at once, each bounded by `timeout_ms`.
  std::vector<Status> link(const std::vector<DialTarget>& targets, int64_t timeout_ms);
  std::vector<Status> unlink(const std::vector<uint64_t>& cluster_ids, int64_t timeout_ms,
                             bool force);
  // The collective link(): see Communicator.
  int64_t link_members(CommSpec spec);
  void unlink_members(int64_t comm_id);
  CommState comm_state(int64_t comm_id) const;

  // Why the last attempt to link with the cluster failed; empty if it did not. This process's own
  // attempts count before those of the peer.
  std::string last_link_error(uint64_t cluster_id) const;

  bool linked(uint64_t cluster_id) const;
  // Throws Error unless the peer answers within sync_kv_timeout.
  void check_link(uint64_t cluster_id);

  void pull_cache(const Remote& src, int64_t dst_cache_id, const RowPull& row,
                  const Layers& layers);
  void pull_blocks(const Remote& src, int64_t dst_cache_id, const std::vector<uint64_t>& src_blocks,
                   const std::vector<uint64_t>& dst_blocks, const Layers& layers);
  void push_cache(const Remote& dst, int64_t src_cache_id, uint64_t src_batch_index,
                  const Layers& layers);
  void push_blocks(const PushTarget& dst, int64_t src_cache_id,
                   const std::vector<uint64_t>& src_blocks, const std::vector<uint64_t>& dst_blocks,
                   const Layers& layers);

  // Starts a layer-wise transfer; `finalize` ends it.
  std::shared_ptr<LayerTask> transfer(LayerRequest request, std::shared_ptr<LayerGate> gate);

  // From now on no push without a token writes into this cache.
  void require_reservations(int64_t cache_id);
  uint64_t open_reservation(int64_t cache_id, std::vector<uint64_t> blocks);
  void close_reservation(uint64_t token);

  void copy_row(int64_t dst_cache_id, int64_t src_cache_id, const RowCopy& copy);
  void copy_blocks(int64_t cache_id, const std::vector<uint64_t>& src,
                   const std::vector<uint64_t>& dst);
  void move_blocks(const LocalCache& src, const LocalCache& dst,
                   const std::vector<uint64_t>& src_blocks,
                   const std::vector<uint64_t>& dst_blocks);

  Prober& prober() { return prober_; }

 private:
  class Call;  // counts a call in progress
  struct LinkError {
    std::string sentence;
    bool own = false;
  };

  void end_links();
  void start_listening(const std::string& ip, uint16_t port);
  const std::shared_ptr<MemoryPool>& pool(bool host_placed) const;
  void require_pool() const;
  SharedHold share(const CacheSpec& spec);
  void greet(UniqueFd tcp, int stop_fd, std::atomic<bool>& heard);
  void file(Greeted greeted);
  Status dial(const DialTarget& target, int64_t timeout_ms);
  void dial_checked(const DialTarget& target, const WaitLimit& limit);
  Status unlink_one(uint64_t cluster_id, int64_t timeout_ms, bool force);
  void note_linked(uint64_t cluster_id, const char* how);
  void note_link_error(uint64_t cluster_id, const std::string& sentence, bool own);

  const EngineOptions options_;
  const pid_t owner_pid_;
  CopyThreads copy_threads_;
  const Identity identity_;
  const SignalFd stop_;
  Prober prober_;
  std::shared_ptr<MemoryPool> device_pool_;
  std::shared_ptr<MemoryPool> host_pool_;
  LinkTable links_;
  SharedRegions regions_;
  CacheTable caches_;
  ReservationTable reservations_;
  Service service_;
  Transfers transfers_;
  LayerTasks tasks_;
  LocalCopies local_copies_;
  CommTable comms_;

  mutable std::mutex listen_mutex_;
  std::string listen_ip_;
  uint16_t listen_port_ = 0;  // as it was asked for
  std::unique_ptr<Acceptor> acceptor_;

  mutable std::mutex mutex_;
  mutable std::condition_variable idle_;
  mutable int active_calls_ = 0;
  bool finalized_ = false;
  std::map<uint64_t, LinkError> link_errors_;
};

}  // namespace llmdd
