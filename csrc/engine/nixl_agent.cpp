#include "engine/nixl_agent.h"

#include <cstdlib>

#include "common/clock.h"
#include "common/log.h"
#include "common/random.h"
#include "common/status.h"
#include "engine/poll_pause.h"

namespace llmdd {
namespace {

constexpr const char* kPlugin = "UCX";
// How long a write that nobody waits for may go on.
constexpr int64_t kSettleMs = 250;

void check(int status, const char* what, Status failure = Status::kFailed) {
  if (status == NixlLibrary::kSuccess) return;
  throw Error(failure, std::string("NIXL: ") + what + " failed with " + std::to_string(status) +
                           "; NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info in the environment say "
                           "more");
}

// Names must differ between all agents that a process ever meets.
std::string unique_name() {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string name = "llmdd-";
  for (uint8_t byte : random_nonce()) {
    name += kDigits[byte >> 4];
    name += kDigits[byte & 15];
  }
  return name;
}

// A list of descriptors, which NIXL copies what it needs from.
class DescriptorList {
 public:
  DescriptorList(const NixlLibrary& nixl, uint64_t addr, size_t size) : nixl_(nixl) {
    check(nixl.create_xfer_dlist(NixlLibrary::kDram, &list_, false), "making a list");
    nixl.xfer_dlist_add(list_, addr, size, 0);
  }
  DescriptorList(const DescriptorList&) = delete;
  DescriptorList& operator=(const DescriptorList&) = delete;
  ~DescriptorList() { nixl_.destroy_xfer_dlist(list_); }

  NixlLibrary::Handle get() const { return list_; }

 private:
  const NixlLibrary& nixl_;
  NixlLibrary::Handle list_ = nullptr;
};

}  // namespace

NixlAgent::NixlAgent(std::shared_ptr<const NixlLibrary> nixl) : nixl_(std::move(nixl)) {
  NixlLibrary::AgentConfig config;
  check(nixl_->create_agent(unique_name().c_str(), &config, &agent_), "making an agent");
  try {
    create_backend();
    check(nixl_->create_notif_map(&notifications_), "making a list");
  } catch (const Error&) {
    nixl_->destroy_agent(agent_);
    throw;
  }
}

NixlAgent::~NixlAgent() {
  nixl_->destroy_notif_map(notifications_);
  if (nixl_->destroy_agent(agent_) != NixlLibrary::kSuccess) {
    log(LogLevel::kError, "NIXL: an agent could not be ended; its memory stays registered");
  }
  nixl_->destroy_backend(backend_);  // the handle only; the agent owned the backend
}

void NixlAgent::create_backend() {
  NixlLibrary::Handle memories = nullptr;
  NixlLibrary::Handle params = nullptr;
  check(nixl_->get_plugin_params(agent_, kPlugin, &memories, &params), "finding its UCX plugin");
  nixl_->destroy_mem_list(memories);
  int status = nixl_->create_backend(agent_, kPlugin, params, &backend_);
  nixl_->destroy_params(params);
  check(status, "starting UCX");
}

void NixlAgent::register_memory(void* addr, size_t size) {
  std::lock_guard lock(mutex_);
  NixlLibrary::Handle list = nullptr;
  check(nixl_->create_reg_dlist(NixlLibrary::kDram, &list, false), "making a list");
  nixl_->reg_dlist_add(list, reinterpret_cast<uintptr_t>(addr), size, 0, nullptr, 0);
  int status = nixl_->register_mem(agent_, list, nullptr);
  nixl_->destroy_reg_dlist(list);
  check(status, "registering memory");
}

Bytes NixlAgent::metadata() {
  std::lock_guard lock(mutex_);
  void* data = nullptr;
  size_t size = 0;
  check(nixl_->get_local_md(agent_, &data, &size), "describing an agent");
  auto* bytes = static_cast<const uint8_t*>(data);
  Bytes metadata(bytes, bytes + size);
  std::free(data);
  return metadata;
}

void NixlAgent::connect(const Bytes& metadata) {
  std::lock_guard lock(mutex_);
  char* name = nullptr;
  check(nixl_->load_remote_md(agent_, metadata.data(), metadata.size(), &name),
        "reading the peer's metadata", Status::kLinkFailed);
  peer_ = name;
  std::free(name);
}

std::unique_ptr<NixlAgent::Write> NixlAgent::write(const void* local, uint64_t remote,
                                                   size_t size) {
  std::lock_guard lock(mutex_);
  DescriptorList from(*nixl_, reinterpret_cast<uint64_t>(local), size);
  DescriptorList to(*nixl_, remote, size);
  NixlLibrary::Handle request = nullptr;
  check(nixl_->create_xfer_req(agent_, NixlLibrary::kWrite, from.get(), to.get(), peer_.c_str(),
                               &request, nullptr),
        "preparing a write");
  auto write = std::make_unique<Write>(*this, request);
  write->status_ = nixl_->post_xfer_req(agent_, request, nullptr);
  return write;
}

void NixlAgent::progress() {
  std::lock_guard lock(mutex_);
  check(nixl_->get_notifs(agent_, notifications_, nullptr), "making progress");
  nixl_->notif_map_clear(notifications_);  // none is expected
}

NixlAgent::Write::~Write() {
  // UCX cancels badly what is on its way, and nearly all of it ends in a moment.
  Deadline deadline = Deadline::after_ms(kSettleMs);
  PollPause pause;
  try {
    while (!done() && !deadline.passed()) pause.pause();
  } catch (const Error&) {
    // It has ended.
  }
  std::lock_guard lock(agent_.mutex_);
  agent_.nixl_->release_xfer_req(agent_.agent_, request_);
  agent_.nixl_->destroy_xfer_req(request_);
}

bool NixlAgent::Write::done() {
  std::lock_guard lock(agent_.mutex_);
  if (status_ == NixlLibrary::kInProgress) {
    status_ = agent_.nixl_->get_xfer_status(agent_.agent_, request_);
  }
  if (status_ == NixlLibrary::kInProgress) return false;
  check(status_, "a write");
  return true;
}

}  // namespace llmdd
