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
#include "engine/handshake.h"
#include "engine/layer_task.h"
#include "engine/link_table.h"
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

  int64_t register_cache(const CacheSpec& spec, const std::vector<RowKey>& keys);
  int64_t register_blocks_cache(const CacheSpec& spec, std::optional<uint64_t> model_id);
  void unregister_cache(int64_t cache_id);

  // One status per target, in order; up to 16 dials run at once, each bounded by `timeout_ms`.
  std::vector<Status> link(const std::vector<DialTarget>& targets, int64_t timeout_ms);
  std::vector<Status> unlink(const std::vector<uint64_t>& cluster_ids, int64_t timeout_ms,
                             bool force);
  // Why the last attempt to link with the cluster failed; empty if it did not. This process's own
  // attempts count before those of the peer.
  std::string last_link_error(uint64_t cluster_id) const;

  void pull_cache(const Remote& src, int64_t dst_cache_id, uint64_t batch_index, int64_t size,
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

  uint64_t open_reservation(int64_t cache_id, std::vector<uint64_t> blocks);
  void close_reservation(uint64_t token);

  Prober& prober() { return prober_; }

 private:
  class Call;  // counts a call in progress
  struct LinkError {
    std::string sentence;
    bool own = false;
  };

  void greet(UniqueFd tcp);
  void file(Greeted greeted);
  Status dial(const DialTarget& target, int64_t timeout_ms);
  void dial_checked(const DialTarget& target, const WaitLimit& limit);
  Status unlink_one(uint64_t cluster_id, int64_t timeout_ms, bool force);
  void note_linked(uint64_t cluster_id, const char* how);
  void note_link_error(uint64_t cluster_id, const std::string& sentence, bool own);

  const EngineOptions options_;
  const pid_t owner_pid_;
  const Identity identity_;
  const SignalFd stop_;
  Prober prober_;
  CacheTable caches_;
  ReservationTable reservations_;
  LinkTable links_;
  Service service_;
  Transfers transfers_;
  LayerTasks tasks_;
  std::unique_ptr<Acceptor> acceptor_;

  mutable std::mutex mutex_;
  mutable std::condition_variable idle_;
  mutable int active_calls_ = 0;
  bool finalized_ = false;
  std::map<uint64_t, LinkError> link_errors_;
};

}  // namespace llmdd
