// Threads that cannot be had: a limit of processes or memory is an error of one call, not of the
// process.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "common/status.h"

namespace llmdd {

// `whose` begins the sentence. Throws Error(failure).
template <typename... Call>
std::thread start_thread(const char* whose, Status failure, Call&&... call) {
  try {
    return std::thread(std::forward<Call>(call)...);
  } catch (const std::system_error& error) {
    throw Error(failure, std::string(whose) + " thread does not start: " + error.what());
  }
}

}  // namespace llmdd
