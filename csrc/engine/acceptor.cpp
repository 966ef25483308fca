#include "engine/acceptor.h"

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "common/log.h"
#include "common/socket_io.h"
#include "common/start_thread.h"

namespace llmdd {
namespace {

constexpr size_t kMaxGreeters = 64;
constexpr int kBackOffMs = 100;

// A forked child gets a copy of the listener, which would keep the port after this process has
// ended and let connections pile up that nobody serves.
std::atomic<int> g_listener{-1};

void close_in_child() {
  int fd = g_listener.exchange(-1);
  if (fd >= 0) ::close(fd);
}

void guard_forks(int listener) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, close_in_child);
  if (registered != 0) throw Error(Status::kFailed, "pthread_atfork failed: out of memory");
  g_listener = listener;
}

}  // namespace

Acceptor::Acceptor(const std::string& ip, uint16_t port, Greet greet)
    : greet_(std::move(greet)),
      listener_(listen_tcp(ip, port)),
      port_(bound_port(listener_.get())) {
  guard_forks(listener_.get());
  try {
    thread_ = start_thread("the listener's", Status::kFailed, &Acceptor::run, this);
  } catch (const Error&) {
    g_listener = -1;  // its number will be another's
    throw;
  }
}

Acceptor::~Acceptor() {
  stop_.set();
  // A newer listener may have taken the place already.
  int own = listener_.get();
  g_listener.compare_exchange_strong(own, -1);
  thread_.join();
  for (Greeter& greeter : greeters_) greeter.stop.set();
  for (Greeter& greeter : greeters_) greeter.thread.join();
}

void Acceptor::run() {
  while (true) {
    pollfd fds[2] = {{listener_.get(), POLLIN, 0}, {stop_.fd(), POLLIN, 0}};
    if (::poll(fds, 2, -1) < 0 && errno != EINTR) break;
    if (fds[1].revents != 0) return;
    if (fds[0].revents != 0) accept_all();
    reap();
  }
  log(LogLevel::kError, "the accept thread ended: poll failed: " + errno_text(errno));
}

void Acceptor::accept_all() {
  while (UniqueFd tcp = accept_one(listener_.get())) start_greeter(std::move(tcp));
  if (errno != EMFILE && errno != ENFILE) return;
  // The connection stays in the queue and poll(2) would return at once, so wait for descriptors.
  log(LogLevel::kError, "cannot accept a link: " + errno_text(errno));
  pollfd stop{stop_.fd(), POLLIN, 0};
  ::poll(&stop, 1, kBackOffMs);
}

void Acceptor::start_greeter(UniqueFd tcp) {
  reap();
  if (greeters_.size() >= kMaxGreeters && !make_room()) {
    log(LogLevel::kWarning, "a connection was closed: 64 handshakes are in progress");
    return;
  }
  try {
    Greeter& greeter = greeters_.emplace_back();
    greeter.thread = std::thread([this, &greeter, fd = std::move(tcp)]() mutable {
      greet_(std::move(fd), greeter.stop.fd(), greeter.heard);
      greeter.done = true;
    });
  } catch (const std::exception& error) {
    // Out of descriptors or threads; the other callers and the accept thread go on.
    if (!greeters_.empty() && !greeters_.back().thread.joinable()) greeters_.pop_back();
    log(LogLevel::kError, std::string("a connection was closed: ") + error.what());
  }
}

// Ends the oldest handshake whose caller has not said who it is.
bool Acceptor::make_room() {
  auto silent = std::find_if(greeters_.begin(), greeters_.end(),
                             [](const Greeter& greeter) { return !greeter.heard; });
  if (silent == greeters_.end()) return false;
  silent->stop.set();
  silent->thread.join();
  greeters_.erase(silent);
  return true;
}

void Acceptor::reap() {
  for (auto it = greeters_.begin(); it != greeters_.end();) {
    if (it->done) {
      it->thread.join();
      it = greeters_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace llmdd
