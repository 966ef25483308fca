#include "engine/socket_directory.h"

#include <sys/un.h>

#include <cstdlib>

namespace llmdd {

std::string socket_base(size_t rest) {
  const char* configured = std::getenv("TMPDIR");
  std::string base = configured != nullptr && configured[0] == '/' ? configured : "/tmp";
  return base.size() + rest < sizeof(sockaddr_un::sun_path) ? base : "/tmp";
}

}  // namespace llmdd
