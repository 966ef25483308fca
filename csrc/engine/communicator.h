// One collective link(): its members meet in the background and link pairwise.
//
//   PREPARING --every member has come--> OK
//   PREPARING --deadline, or a member was refused too often--> FAILED
//
// Each member listens at its meeting point and dials those of lower rank, so that each pair meets
// once. Pairs that are linked already share that link.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "common/clock.h"
#include "common/signal_fd.h"
#include "engine/handshake.h"
#include "engine/link_table.h"
#include "engine/meeting_point.h"

namespace llmdd {

// Values of RegisterMemStatus.
enum class CommState : int { kOk = 0, kPreparing = 1, kFailed = 2 };

// What the communicators of one engine share.
struct CommContext {
  const Identity& identity;
  const Prober& prober;
  LinkTable& links;
  RequestHandler& handler;
  int64_t total_time_ms = 0;  // of one set-up
  uint32_t retries = 1;       // after a failed handshake with a member
  // Keeps why a cluster could not be linked.
  std::function<void(uint64_t cluster_id, const std::string& sentence)> note;
};

class Communicator {
 public:
  // Starts at once. `spec` names this process's own cluster.
  Communicator(const CommContext& context, CommSpec spec);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  ~Communicator();

  CommState state() const { return state_; }
  // Ends the set-up, if it runs, and waits for its thread.
  void cancel();
  bool uses(const Link& link) const;
  std::vector<std::shared_ptr<Link>> links() const;

 private:
  void run();
  void meet_all();
  void dial_member(size_t member);
  UniqueFd reach(const std::string& path) const;
  bool try_dial(uint64_t cluster_id, const std::string& path);
  void welcome_one();
  void file(Greeted greeted);
  void met(std::shared_ptr<Link> link);
  std::shared_ptr<Link> live_link(uint64_t cluster_id) const;
  std::shared_ptr<Link> agreed_link(uint64_t cluster_id) const;
  void count_failure(uint64_t cluster_id, const std::string& sentence);
  void succeed();
  void fail(const std::string& sentence);
  void pause(int wait_ms) const;
  bool awaited(uint64_t cluster_id) const { return awaited_.count(cluster_id) != 0; }
  WaitLimit limit() const { return {deadline_, stop_.fd()}; }
  std::string describe() const { return "link() of '" + spec_.name + "'"; }

  const CommContext& context_;
  const CommSpec spec_;
  const Deadline deadline_;
  const SignalFd stop_;
  std::atomic<bool> cancelled_{false};
  std::atomic<CommState> state_{CommState::kPreparing};

  // Set-up thread only.
  std::unique_ptr<MeetingPoint> point_;
  std::set<uint64_t> awaited_;
  std::map<uint64_t, uint32_t> failures_;

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Link>> links_;
  std::thread thread_;
};

}  // namespace llmdd
