// Log sentences of the engine. The binding forwards them to Python's logging.
//
// Never log while holding a mutex: the sink may wait for the GIL, and its holder may wait for the
// mutex.
#pragma once

#include <string>

namespace llmdd {

enum class LogLevel { kDebug = 10, kInfo = 20, kWarning = 30, kError = 40 };

using LogSink = void (*)(LogLevel, const std::string&);

// nullptr restores the default, which drops everything.
void set_log_sink(LogSink sink);
void log(LogLevel level, const std::string& sentence);

}  // namespace llmdd
