// What a test program demands. A failed check ends the process: other threads may still be running,
// so nothing can be unwound.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "common/status.h"

namespace llmdd::test {

// Called before the process ends, if it is set.
inline void (*on_failure)() = nullptr;

[[noreturn]] inline void give_up() {
  if (on_failure != nullptr) on_failure();
  std::fflush(stderr);
  std::_Exit(1);
}

inline void demand(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
  give_up();
}

#define LLMDD_CHECK(condition) ::llmdd::test::demand((condition), #condition, __FILE__, __LINE__)

// Runs `call`, which may fail with one of these codes only. True when it succeeded.
template <typename Call>
bool attempt(std::initializer_list<Status> allowed, Call call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    for (Status status : allowed) {
      if (status == error.status()) return false;
    }
    std::fprintf(stderr, "unexpected code %#x: %s\n", static_cast<unsigned>(error.status()),
                 error.what());
    give_up();
  }
}

}  // namespace llmdd::test
