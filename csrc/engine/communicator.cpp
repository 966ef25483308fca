#include "engine/communicator.h"

#include <poll.h>

#include <algorithm>

#include "common/log.h"
#include "common/socket_io.h"
#include "common/start_thread.h"

namespace llmdd {
namespace {

// A member that is not there yet is looked for in these intervals, the shorter ones first.
constexpr int kFirstPauseMs = 5;
constexpr int kLongestPauseMs = 100;

// Two members can meet in several comms and by link_clusters at once; whose link stays is decided
// in the table, and one side can know it before the other.
bool passing(Status status) {
  return status == Status::kAlreadyLink || status == Status::kNotYetLink;
}

}  // namespace

Communicator::Communicator(const CommContext& context, CommSpec spec)
    : context_(context),
      spec_(std::move(spec)),
      deadline_(Deadline::after_ms(context.total_time_ms)) {
  for (auto [cluster_id, rank] : spec_.members) {
    if (cluster_id != context_.identity.cluster_id) awaited_.insert(cluster_id);
  }
  thread_ = start_thread("the comm's", Status::kLinkFailed, &Communicator::run, this);
}

Communicator::~Communicator() { cancel(); }

void Communicator::cancel() {
  cancelled_ = true;
  stop_.set();
  if (thread_.joinable()) thread_.join();
}

bool Communicator::uses(const Link& link) const {
  std::lock_guard lock(mutex_);
  return std::any_of(links_.begin(), links_.end(),
                     [&link](const auto& used) { return used.get() == &link; });
}

std::vector<std::shared_ptr<Link>> Communicator::links() const {
  std::lock_guard lock(mutex_);
  return links_;
}

void Communicator::run() {
  try {
    meet_all();
    succeed();
  } catch (const std::exception& error) {
    if (!cancelled_) fail(error.what());
  }
  point_.reset();
}

void Communicator::meet_all() {
  const auto& members = spec_.members;
  auto own = std::find_if(members.begin(), members.end(), [this](const auto& member) {
    return member.first == context_.identity.cluster_id;
  });
  size_t own_index = static_cast<size_t>(own - members.begin());
  point_ = std::make_unique<MeetingPoint>(meeting_path(spec_, own_index));
  for (size_t member = 0; member < own_index; ++member) dial_member(member);
  while (!awaited_.empty()) welcome_one();
}

void Communicator::dial_member(size_t member) {
  std::string path = meeting_path(spec_, member);
  int pause_ms = kFirstPauseMs;
  while (true) {
    if (try_dial(spec_.members[member].first, path)) return;
    if (deadline_.passed()) throw Error(Status::kTimeout, "no answer in time");
    pause(pause_ms);
    pause_ms = std::min(2 * pause_ms, kLongestPauseMs);
  }
}

// Empty when the member has not called link() yet.
UniqueFd Communicator::reach(const std::string& path) const {
  try {
    return dial_unix(path, limit());
  } catch (const Error&) {
    return {};
  }
}

// False: try again later.
bool Communicator::try_dial(uint64_t cluster_id, const std::string& path) {
  try {
    if (std::shared_ptr<Link> live = live_link(cluster_id)) {
      UniqueFd connection = reach(path);
      if (!connection) return false;
      greet_as_linked(context_.identity, cluster_id, std::move(connection), limit());
      met(std::move(live));
      return true;
    }
    LinkReservation reservation(context_.links, cluster_id);
    UniqueFd connection = reach(path);
    if (!connection) return false;
    Greeted greeted = greet_over(context_.identity, context_.prober, cluster_id,
                                 std::move(connection), limit(), [&] { reservation.confirm(); });
    auto link = std::make_shared<Link>(std::move(greeted), context_.handler);
    link->hold();
    reservation.commit(link);
    context_.links.start(*link);
    met(std::move(link));
    return true;
  } catch (const Error& error) {
    if (!passing(error.status())) count_failure(cluster_id, error.what());
  } catch (const WireError& error) {
    count_failure(cluster_id, error.what());
  }
  return false;
}

void Communicator::welcome_one() {
  wait_ready(point_->fd(), POLLIN, limit(), "waiting for the other members");
  UniqueFd caller = accept_one(point_->fd());
  if (!caller) return;
  std::optional<uint64_t> cluster_id;
  std::shared_ptr<Link> agreed;
  try {
    greet_dialer(context_.identity, context_.prober, std::move(caller), stop_.fd(), cluster_id,
                 {[this](Greeted greeted) { file(std::move(greeted)); },
                  [&agreed, this](uint64_t peer) { agreed = agreed_link(peer); },
                  {}});
  } catch (const Error& error) {
    if (agreed) {
      met(std::move(agreed));
    } else if (!cluster_id || !awaited(*cluster_id)) {
      log(LogLevel::kWarning, describe() + ": a caller was refused: " + error.what());
    } else if (!passing(error.status())) {
      count_failure(*cluster_id, error.what());
    }
  }
}

// Only when both sides know the link: the dialling member will not come again.
std::shared_ptr<Link> Communicator::agreed_link(uint64_t cluster_id) const {
  std::shared_ptr<Link> live = awaited(cluster_id) ? live_link(cluster_id) : nullptr;
  if (!live) throw Error(Status::kNotYetLink, "this side knows of no live link yet");
  return live;
}

void Communicator::file(Greeted greeted) {
  if (!awaited(greeted.cluster_id)) {
    throw Error(Status::kParamInvalid, "cluster " + std::to_string(greeted.cluster_id) +
                                           " is not awaited by " + describe());
  }
  auto link = std::make_shared<Link>(std::move(greeted), context_.handler,
                                     encode_frame(MessageType::kVerdict, 0, Outcome{}.encode()));
  link->hold();
  context_.links.accept(link);
  context_.links.start(*link);
  met(std::move(link));
}

void Communicator::met(std::shared_ptr<Link> link) {
  awaited_.erase(link->cluster_id());
  std::lock_guard lock(mutex_);
  links_.push_back(std::move(link));
}

// A dead link of an earlier life is removed, so that a new one can be made.
std::shared_ptr<Link> Communicator::live_link(uint64_t cluster_id) const {
  std::shared_ptr<Link> link = context_.links.find(cluster_id);
  if (!link || !link->hung_up()) return link;
  link->forget("replaced");
  if (context_.links.take(*link)) link->join();
  return nullptr;
}

void Communicator::count_failure(uint64_t cluster_id, const std::string& sentence) {
  if (cancelled_) throw Error(Status::kFailed, "cancelled");
  context_.note(cluster_id, sentence);
  if (++failures_[cluster_id] <= context_.retries) return;
  throw Error(Status::kLinkFailed, "cluster " + std::to_string(cluster_id) + ": " + sentence);
}

void Communicator::succeed() {
  for (const auto& link : links()) link->release();
  state_ = CommState::kOk;
  log(LogLevel::kInfo, describe() + ": all members are linked");
}

void Communicator::fail(const std::string& sentence) {
  for (uint64_t cluster_id : awaited_) {
    if (failures_.count(cluster_id) != 0) continue;
    context_.note(
        cluster_id,
        describe() + ": " + (deadline_.passed() ? "the member did not come in time" : sentence));
  }
  state_ = CommState::kFailed;
  log(LogLevel::kWarning, describe() + " failed: " + sentence);
}

void Communicator::pause(int wait_ms) const {
  pollfd stop{stop_.fd(), POLLIN, 0};
  if (::poll(&stop, 1, std::min(wait_ms, deadline_.remaining_ms())) > 0) {
    throw Error(Status::kFailed, "cancelled");
  }
}

}  // namespace llmdd
