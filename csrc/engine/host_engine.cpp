#include "engine/host_engine.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <thread>

#include "common/log.h"
#include "engine/staging_slab.h"

namespace llmdd {
namespace {

constexpr size_t kParallelDials = 16;
constexpr size_t kMaxLinkErrors = 1024;

// What link_clusters reports: details are in the sentence.
Status link_status(Status status) {
  bool exact = status == Status::kParamInvalid || status == Status::kAlreadyLink ||
               status == Status::kTimeout;
  return exact ? status : Status::kLinkFailed;
}

std::shared_ptr<MemoryPool> make_pool(const std::optional<PoolConfig>& config) {
  return config ? std::make_shared<MemoryPool>(*config) : nullptr;
}

Identity make_identity(const EngineOptions& options, CopyThreads& threads) {
  Identity identity{options.cluster_id, options.remote_access, options.transport,
                    options.link_secret};
  size_t num_slots = (size_t{options.staging_mib} << 20) / kSlotBytes;
  identity.nixl = std::make_shared<NixlLinks>(options.nixl_library, num_slots);
  identity.copy_threads = &threads;
  return identity;
}

}  // namespace

class HostEngine::Call {
 public:
  explicit Call(const HostEngine& engine) : engine_(engine) {
    if (engine.foreign()) {
      throw Error(Status::kFailed,
                  "this process was forked after init; start it with spawn, or call init in it");
    }
    std::lock_guard lock(engine.mutex_);
    if (engine.finalized_) throw Error(Status::kFailed, "the engine is finalized");
    ++engine.active_calls_;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() {
    std::lock_guard lock(engine_.mutex_);
    if (--engine_.active_calls_ == 0) engine_.idle_.notify_all();
  }

 private:
  const HostEngine& engine_;
};

HostEngine::HostEngine(const EngineOptions& options)
    : options_(options),
      owner_pid_(::getpid()),
      copy_threads_(usual_copy_helpers()),
      identity_(make_identity(options, copy_threads_)),
      device_pool_(make_pool(options.device_pool)),
      host_pool_(make_pool(options.host_pool)),
      links_(options.cluster_id),
      regions_(options.transport, options.share_memory,
               [this](uint64_t file_id) { links_.withdraw(file_id); }),
      service_(caches_, reservations_, links_, options.remote_access),
      transfers_(options_, caches_, links_),
      local_copies_(caches_),
      comms_({identity_, prober_, links_, service_, options.link_total_time_ms,
              options.link_retries, [this](uint64_t cluster_id, const std::string& sentence) {
                note_link_error(cluster_id, sentence, true);
              }}) {
  start_listening(options.listen_ip, options.listen_port);
  allow_readers();
}

HostEngine::~HostEngine() { finalize(); }

bool HostEngine::foreign() const { return ::getpid() != owner_pid_; }

void HostEngine::finalize() {
  {
    std::lock_guard lock(mutex_);
    if (finalized_) return;
    finalized_ = true;
  }
  stop_.set();
  tasks_.cancel_all();
  end_links();
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return active_calls_ == 0; });
  lock.unlock();
  end_links();  // what a call in progress has added
  tasks_.cancel_all();
  tasks_.join_all();
  caches_.clear();
  device_pool_.reset();
  host_pool_.reset();
  forbid_readers();
}

void HostEngine::end_links() {
  {
    std::lock_guard lock(listen_mutex_);
    acceptor_.reset();
  }
  comms_.close_all();
  links_.close_all("the engine was finalized");
}

uint16_t HostEngine::listen_port() const {
  Call call(*this);
  std::lock_guard lock(listen_mutex_);
  return acceptor_ ? acceptor_->port() : 0;
}

void HostEngine::start_listening(const std::string& ip, uint16_t port) {
  std::unique_ptr<Acceptor> replacement;
  if (!ip.empty()) {
    replacement = std::make_unique<Acceptor>(
        ip, port, [this](UniqueFd tcp, int stop_fd, std::atomic<bool>& heard) {
          greet(std::move(tcp), stop_fd, heard);
        });
  }
  acceptor_ = std::move(replacement);
  listen_ip_ = ip;
  listen_port_ = port;
}

void HostEngine::listen(const std::string& ip, uint16_t port) {
  Call call(*this);
  std::lock_guard lock(listen_mutex_);
  links_.reap();
  if (links_.size() > 0 || !comms_.empty()) {
    throw Error(Status::kExistLink, "there are " + std::to_string(links_.size()) +
                                        " links; unlink them before the role is switched");
  }
  bool bound_there = acceptor_ && (port == listen_port_ || port == acceptor_->port());
  if (ip == listen_ip_ && (ip.empty() || bound_there)) return;
  start_listening(ip, port);
}

const std::shared_ptr<MemoryPool>& HostEngine::pool(bool host_placed) const {
  const auto& wanted = host_placed ? host_pool_ : device_pool_;
  if (!wanted) {
    throw Error(Status::kFeatureNotEnabled,
                std::string("there is no memory pool; set LLMConfig.") +
                    (host_placed ? "host_mem_pool_cfg" : "mem_pool_cfg"));
  }
  return wanted;
}

void HostEngine::require_pool() const {
  if (!device_pool_ && !host_pool_) pool(false);
}

Allocated HostEngine::allocate_cache(const CacheSpec& spec, size_t num_tensors,
                                     const std::vector<RowKey>& keys,
                                     std::optional<uint64_t> blocks_model_id) {
  Call call(*this);
  Allocated allocated =
      caches_.allocate(spec, num_tensors, pool(spec.host_placed), keys, blocks_model_id, regions_);
  regions_.explain();
  return allocated;
}

void HostEngine::deallocate_cache(int64_t cache_id) {
  Call call(*this);
  require_pool();
  caches_.deallocate(cache_id);
}

void HostEngine::remove_cache_key(const RowKey& key) {
  Call call(*this);
  require_pool();
  caches_.remove_key(key);
}

uint64_t HostEngine::pool_used_bytes(bool host_placed) const {
  Call call(*this);
  return pool(host_placed)->used_bytes();
}

// Before the cache is known, so that no copy into it runs.
SharedHold HostEngine::share(const CacheSpec& spec) {
  CacheLayout layout;
  try {
    layout = layout_of(spec);
  } catch (const Error&) {
    return {};  // the table refuses it, too, and says so
  }
  SharedHold shared = regions_.share(layout, Contents::kKept);
  regions_.explain();
  return shared;
}

int64_t HostEngine::register_cache(const CacheSpec& spec, const std::vector<RowKey>& keys) {
  Call call(*this);
  return caches_.add(spec, keys, std::nullopt, share(spec));
}

int64_t HostEngine::register_blocks_cache(const CacheSpec& spec, std::optional<uint64_t> model_id) {
  Call call(*this);
  return caches_.add(spec, {}, model_id, share(spec));
}

void HostEngine::unregister_cache(int64_t cache_id) {
  Call call(*this);
  caches_.remove(cache_id);
}

void HostEngine::greet(UniqueFd tcp, int stop_fd, std::atomic<bool>& heard) {
  std::optional<uint64_t> cluster_id;
  try {
    greet_dialer(identity_, prober_, std::move(tcp), stop_fd, cluster_id,
                 {[this](Greeted greeted) { file(std::move(greeted)); },
                  [this](uint64_t peer) { links_.require(peer); }, [&heard] { heard = true; }});
  } catch (const std::exception& error) {
    if (cluster_id) return note_link_error(*cluster_id, error.what(), false);
    log(LogLevel::kWarning, std::string("a caller at the listening port: ") + error.what());
  }
}

void HostEngine::file(Greeted greeted) {
  uint64_t cluster_id = greeted.cluster_id;
  auto link = std::make_shared<Link>(std::move(greeted), service_,
                                     encode_frame(MessageType::kVerdict, 0, Outcome{}.encode()));
  links_.accept(link);
  // After those have left the table whose peers have died, so that it keeps nothing of them.
  links_.reap();
  links_.start(*link);
  note_linked(cluster_id, "linked by the peer");
}

void HostEngine::dial_checked(const DialTarget& target, const WaitLimit& limit) {
  if (target.cluster_id == options_.cluster_id) {
    throw Error(Status::kParamInvalid, "a process cannot link to itself");
  }
  LinkReservation reservation(links_, target.cluster_id);
  Greeted greeted =
      greet_listener(identity_, prober_, target, limit, [&reservation] { reservation.confirm(); });
  auto link = std::make_shared<Link>(std::move(greeted), service_);
  reservation.commit(link);
  links_.start(*link);
}

Status HostEngine::dial(const DialTarget& target, int64_t timeout_ms) {
  auto failed = [&](const char* reason, Status status) {
    note_link_error(target.cluster_id,
                    "linking to " + target.ip + ":" + std::to_string(target.port) + ": " + reason,
                    true);
    return link_status(status);
  };
  try {
    dial_checked(target, {Deadline::after_ms(timeout_ms), stop_.fd()});
  } catch (const Error& error) {
    return failed(error.what(), error.status());
  } catch (const std::exception& error) {
    return failed(error.what(), Status::kLinkFailed);  // nothing may leave a helper of `link`
  }
  note_linked(target.cluster_id, "linked");
  return Status::kSuccess;
}

std::vector<Status> HostEngine::link(const std::vector<DialTarget>& targets, int64_t timeout_ms) {
  Call call(*this);
  links_.reap();
  std::vector<Status> results(targets.size(), Status::kLinkFailed);
  std::atomic<size_t> next{0};
  auto work = [&] {
    for (size_t i = next++; i < targets.size(); i = next++) {
      results[i] = dial(targets[i], timeout_ms);
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (size_t i = 1; i < std::min(targets.size(), kParallelDials); ++i) {
      helpers.emplace_back(work);
    }
  } catch (const std::system_error& error) {
    log(LogLevel::kWarning, std::string("links are made one after the other: ") + error.what());
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  return results;
}

Status HostEngine::unlink_one(uint64_t cluster_id, int64_t timeout_ms, bool force) {
  std::shared_ptr<Link> link = links_.find(cluster_id);
  if (!link) return Status::kSuccess;
  if (!force) {
    try {
      link->call(MessageType::kUnlink, {}, Deadline::after_ms(timeout_ms));
    } catch (const Error& error) {
      if (links_.find(cluster_id) != link) return Status::kSuccess;  // the peer was faster
      note_link_error(cluster_id, std::string("unlinking: ") + error.what(), true);
      return Status::kUnlinkFailed;
    }
  }
  link->forget("by this process");
  if (links_.take(*link)) link->join();
  return Status::kSuccess;
}

std::vector<Status> HostEngine::unlink(const std::vector<uint64_t>& cluster_ids, int64_t timeout_ms,
                                       bool force) {
  Call call(*this);
  std::vector<Status> results;
  for (uint64_t cluster_id : cluster_ids) {
    results.push_back(unlink_one(cluster_id, timeout_ms, force));
  }
  links_.reap();
  return results;
}

int64_t HostEngine::link_members(CommSpec spec) {
  Call call(*this);
  return comms_.link(std::move(spec));
}

void HostEngine::unlink_members(int64_t comm_id) {
  Call call(*this);
  comms_.unlink(comm_id);
  links_.reap();
}

CommState HostEngine::comm_state(int64_t comm_id) const {
  Call call(*this);
  return comms_.state(comm_id);
}

void HostEngine::note_linked(uint64_t cluster_id, const char* how) {
  log(LogLevel::kInfo, "cluster " + std::to_string(cluster_id) + ": " + how);
  std::lock_guard lock(mutex_);
  link_errors_.erase(cluster_id);
}

void HostEngine::note_link_error(uint64_t cluster_id, const std::string& sentence, bool own) {
  log(LogLevel::kWarning, "cluster " + std::to_string(cluster_id) + ": " + sentence);
  std::lock_guard lock(mutex_);
  auto noted = link_errors_.find(cluster_id);
  if (noted != link_errors_.end() && noted->second.own && !own) return;
  if (link_errors_.size() >= kMaxLinkErrors) link_errors_.erase(link_errors_.begin());
  link_errors_[cluster_id] = {sentence, own};
}

std::string HostEngine::last_link_error(uint64_t cluster_id) const {
  Call call(*this);
  std::lock_guard lock(mutex_);
  auto found = link_errors_.find(cluster_id);
  return found == link_errors_.end() ? "" : found->second.sentence;
}

bool HostEngine::linked(uint64_t cluster_id) const {
  Call call(*this);
  return links_.find(cluster_id) != nullptr;
}

void HostEngine::check_link(uint64_t cluster_id) {
  Call call(*this);
  transfers_.check_link(cluster_id);
}

void HostEngine::pull_cache(const Remote& src, int64_t dst_cache_id, const RowPull& row,
                            const Layers& layers) {
  Call call(*this);
  transfers_.pull_cache(src, dst_cache_id, row, layers);
}

void HostEngine::pull_blocks(const Remote& src, int64_t dst_cache_id,
                             const std::vector<uint64_t>& src_blocks,
                             const std::vector<uint64_t>& dst_blocks, const Layers& layers) {
  Call call(*this);
  transfers_.pull_blocks(src, dst_cache_id, src_blocks, dst_blocks, layers);
}

void HostEngine::push_cache(const Remote& dst, int64_t src_cache_id, uint64_t src_batch_index,
                            const Layers& layers) {
  Call call(*this);
  transfers_.push_cache(dst, src_cache_id, src_batch_index, layers);
}

void HostEngine::push_blocks(const PushTarget& dst, int64_t src_cache_id,
                             const std::vector<uint64_t>& src_blocks,
                             const std::vector<uint64_t>& dst_blocks, const Layers& layers) {
  Call call(*this);
  transfers_.push_blocks(dst, src_cache_id, src_blocks, dst_blocks, layers);
}

std::shared_ptr<LayerTask> HostEngine::transfer(LayerRequest request,
                                                std::shared_ptr<LayerGate> gate) {
  Call call(*this);
  auto task = std::make_shared<LayerTask>(transfers_, std::move(request), std::move(gate));
  tasks_.start(task);
  return task;
}

void HostEngine::require_reservations(int64_t cache_id) {
  Call call(*this);
  caches_.get(cache_id)->reserved_only = true;
}

uint64_t HostEngine::open_reservation(int64_t cache_id, std::vector<uint64_t> blocks) {
  Call call(*this);
  return reservations_.open(caches_.get(cache_id), std::move(blocks));
}

void HostEngine::close_reservation(uint64_t token) {
  Call call(*this);
  reservations_.close(token);
}

void HostEngine::copy_row(int64_t dst_cache_id, int64_t src_cache_id, const RowCopy& copy) {
  Call call(*this);
  local_copies_.copy_row(dst_cache_id, src_cache_id, copy);
}

void HostEngine::copy_blocks(int64_t cache_id, const std::vector<uint64_t>& src,
                             const std::vector<uint64_t>& dst) {
  Call call(*this);
  local_copies_.copy_blocks(cache_id, src, dst);
}

void HostEngine::move_blocks(const LocalCache& src, const LocalCache& dst,
                             const std::vector<uint64_t>& src_blocks,
                             const std::vector<uint64_t>& dst_blocks) {
  Call call(*this);
  local_copies_.move_blocks(src, dst, src_blocks, dst_blocks);
}

}  // namespace llmdd
