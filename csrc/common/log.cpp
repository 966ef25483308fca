#include "common/log.h"

#include <atomic>

namespace llmdd {
namespace {
std::atomic<LogSink> g_sink{nullptr};
}  // namespace

void set_log_sink(LogSink sink) { g_sink.store(sink); }

void log(LogLevel level, const std::string& sentence) {
  if (LogSink sink = g_sink.load()) sink(level, sentence);
}

}  // namespace llmdd
