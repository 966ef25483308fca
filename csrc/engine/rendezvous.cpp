#include "engine/rendezvous.h"

#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "common/socket_io.h"

namespace llmdd {
namespace {

constexpr char kDirectoryPattern[] = "/llmdd-XXXXXX";
constexpr char kSocketName[] = "/link.sock";

std::string base_directory() {
  const char* configured = std::getenv("TMPDIR");
  std::string base = configured != nullptr && configured[0] == '/' ? configured : "/tmp";
  size_t length = base.size() + sizeof(kDirectoryPattern) + sizeof(kSocketName);
  return length < sizeof(sockaddr_un::sun_path) ? base : "/tmp";
}

}  // namespace

Rendezvous::Rendezvous() {
  std::string pattern = base_directory() + kDirectoryPattern;
  if (::mkdtemp(pattern.data()) == nullptr) {  // mkdtemp(3) makes it with mode 0700
    throw Error(Status::kLinkFailed, "cannot create the directory " + pattern + ": " +
                                         errno_text(errno) + "; set TMPDIR to a writable one");
  }
  directory_ = pattern;
  socket_path_ = directory_ + kSocketName;
  try {
    listener_ = listen_unix(socket_path_);
  } catch (...) {
    ::rmdir(directory_.c_str());
    throw;
  }
}

Rendezvous::~Rendezvous() {
  ::unlink(socket_path_.c_str());
  ::rmdir(directory_.c_str());
}

}  // namespace llmdd
