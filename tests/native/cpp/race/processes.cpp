// The traffic of two engines in two processes. The peer is this program, started with --peer.
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "race/scenarios.h"

extern char** environ;

namespace llmdd::test {
namespace {

constexpr int kRounds = 100;

// The peer's standard input and output; ends with the process.
class PeerProgram {
 public:
  explicit PeerProgram(const char* program) {
    int to[2];
    int from[2];
    LLMDD_CHECK(::pipe2(to, O_CLOEXEC) == 0 && ::pipe2(from, O_CLOEXEC) == 0);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    std::string name = program;
    std::string role = "--peer";
    char* arguments[] = {name.data(), role.data(), nullptr};
    LLMDD_CHECK(::posix_spawn(&pid_, program, &actions, nullptr, arguments, environ) == 0);
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(to[0]);
    ::close(from[1]);
    write_fd_ = to[1];
    read_fd_ = from[0];
  }
  PeerProgram(const PeerProgram&) = delete;
  PeerProgram& operator=(const PeerProgram&) = delete;
  ~PeerProgram() {
    ::close(write_fd_);
    ::close(read_fd_);
  }

  void send(uint16_t value) const {
    LLMDD_CHECK(::write(write_fd_, &value, sizeof(value)) == sizeof(value));
  }
  uint16_t receive() const {
    uint16_t value = 0;
    LLMDD_CHECK(::read(read_fd_, &value, sizeof(value)) == sizeof(value));
    return value;
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  int wait() const {
    int status = 0;
    LLMDD_CHECK(::waitpid(pid_, &status, 0) == pid_);
    return status;
  }

 private:
  pid_t pid_ = 0;
  int write_fd_ = -1;
  int read_fd_ = -1;
};

}  // namespace

int run_peer_process() {
  TestEngine two(2);
  uint16_t own = two.port();
  uint16_t theirs = 0;
  LLMDD_CHECK(::write(STDOUT_FILENO, &own, sizeof(own)) == sizeof(own));
  LLMDD_CHECK(::read(STDIN_FILENO, &theirs, sizeof(theirs)) == sizeof(theirs));
  Traffic traffic(two, 1, theirs);
  Crew crew;
  traffic.join(crew);
  traffic.link_and_unlink(kRounds);
  LLMDD_CHECK(::write(STDOUT_FILENO, &own, sizeof(own)) == sizeof(own));
  uint16_t end = 0;
  [[maybe_unused]] ssize_t closed = ::read(STDIN_FILENO, &end, sizeof(end));
  return 0;
}

void processes_talk(const char* program) {
  for (bool killed : {false, true}) {
    PeerProgram peer(program);
    TestEngine one(1);
    uint16_t port = peer.receive();
    Traffic traffic(one, 2, port);
    Crew crew;
    traffic.join(crew);
    peer.send(one.port());
    traffic.link_and_unlink(kRounds);
    peer.receive();  // it has linked and unlinked as often
    one.link_surely(2, port);
    if (killed) {
      peer.kill();
      wait_for([&] { return !attempt(kUnlinkedCodes, [&] { one->check_link(2); }); });
    } else {
      peer.send(0);
    }
    int status = peer.wait();
    LLMDD_CHECK(killed ? WIFSIGNALED(status) : status == 0);
  }
}

}  // namespace llmdd::test
