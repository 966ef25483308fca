// The C++ side of Python's HostEngine.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/host_engine.h"

namespace llmdd::bindings {

// Owns the engine, and abandons it in a forked child, where its threads do not exist.
class PyEngine {
 public:
  PyEngine(uint64_t cluster_id, bool remote_access, int64_t sync_kv_timeout_ms,
           const std::string& listen_ip, uint16_t listen_port)
      : engine_(std::make_unique<HostEngine>(EngineOptions{
            cluster_id, remote_access, sync_kv_timeout_ms, listen_ip, listen_port})) {}

  ~PyEngine() {
    if (engine_->foreign()) {
      abandon();
    } else {
      // A link thread that is logging needs the GIL before it can be joined.
      nanobind::gil_scoped_release release;
      engine_.reset();
    }
  }

  HostEngine& get() { return *engine_; }

  void finalize() {
    if (!engine_->foreign()) engine_->finalize();
  }

 private:
  void abandon() {
    static std::vector<HostEngine*> abandoned;  // reachable, so no leak checker reports it
    abandoned.push_back(engine_.release());
  }

  std::unique_ptr<HostEngine> engine_;
};

}  // namespace llmdd::bindings
