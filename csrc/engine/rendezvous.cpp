#include "engine/rendezvous.h"

#include <unistd.h>

#include <cerrno>

#include "common/socket_io.h"
#include "engine/socket_directory.h"

namespace llmdd {
namespace {

constexpr char kDirectoryPattern[] = "/llmdd-XXXXXX";
constexpr char kSocketName[] = "/link.sock";

}  // namespace

Rendezvous::Rendezvous() {
  std::string pattern =
      socket_base(sizeof(kDirectoryPattern) + sizeof(kSocketName)) + kDirectoryPattern;
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
