#include "engine/prober.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>
#include <fstream>

#include "common/socket_io.h"
#include "common/status.h"

namespace llmdd {
namespace {

std::string yama_setting() {
  std::string value;
  std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> value;
  return value.empty() ? "absent here" : "now " + value + " here";
}

ssize_t read_remote(pid_t pid, uint64_t addr, Nonce& out) {
  iovec local{out.data(), out.size()};
  iovec remote{reinterpret_cast<void*>(addr), out.size()};
  return ::process_vm_readv(pid, &local, 1, &remote, 1, 0);
}

}  // namespace

std::string probe_sentence(pid_t pid, int error) {
  std::string process = "memory of process " + std::to_string(pid) + " cannot be read: ";
  if (error == EPERM) {
    return process +
           "the kernel refused process_vm_readv (EPERM); set kernel.yama.ptrace_scope to 0 or 1 (" +
           yama_setting() +
           ") and give both processes the same user and capabilities "
           "(containers: --cap-add=SYS_PTRACE on both)";
  }
  if (error == ESRCH) {
    return process +
           "it is not visible in this container's PID namespace (ESRCH); start both containers in "
           "one "
           "PID namespace (--pid=host or --pid=container:NAME, in Kubernetes "
           "shareProcessNamespace)";
  }
  return process + "process_vm_readv failed (" + errno_text(error) +
         "); allow this system call in the container's seccomp profile and check the kernel's "
         "CONFIG_CROSS_MEMORY_ATTACH";
}

void Prober::probe(pid_t pid, uint64_t nonce_addr, const Nonce& expected) const {
  Nonce seen{};
  ssize_t count = -1;
  errno = injected_;
  if (errno == 0) count = read_remote(pid, nonce_addr, seen);
  if (count < 0) throw Error(Status::kLinkFailed, probe_sentence(pid, errno));
  if (count != static_cast<ssize_t>(seen.size()) || seen != expected) {
    throw Error(
        Status::kLinkFailed,
        "process " + std::to_string(pid) +
            " is not the peer: its memory does not hold the agreed number; the two processes "
            "see different PID namespaces, start both containers in one");
  }
}

void allow_readers() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }
void forbid_readers() { ::prctl(PR_SET_PTRACER, 0, 0, 0, 0); }

}  // namespace llmdd
