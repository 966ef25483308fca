#include "bindings/py_gate.h"

#include <string>
#include <utility>

#include "common/status.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

void log_traceback(uint64_t layer, const nb::python_error& error) {
  try {
    nb::object logger =
        nb::module_::import_("logging").attr("getLogger")("vllm_llmdd_connector.datadist");
    logger.attr("error")("synchronize_layer(%d) raised; the transfer ends", layer,
                         "exc_info"_a = error.value());
  } catch (nb::python_error& again) {
    again.discard_as_unraisable("vllm_llmdd_connector.datadist layer synchronizer");
  }
}

}  // namespace

PyGate::PyGate(nb::object synchronize_layer) : synchronize_layer_(std::move(synchronize_layer)) {}

PyGate::~PyGate() {
  if (!nb::is_alive()) {
    synchronize_layer_.release();  // leaked: the interpreter is gone
    return;
  }
  nb::gil_scoped_acquire gil;
  synchronize_layer_.reset();
}

bool PyGate::ask(uint64_t layer) {
  try {
    nb::object answer = synchronize_layer_(layer, nb::none());
    int truth = PyObject_IsTrue(answer.ptr());
    if (truth < 0) nb::raise_python_error();
    return truth == 1;
  } catch (const nb::python_error& error) {
    log_traceback(layer, error);
  }
  throw Error(Status::kFailed, "synchronize_layer raised");
}

bool PyGate::wait(uint64_t layer, const std::atomic<bool>& cancelled) {
  if (cancelled || !nb::is_alive()) return false;
  if (released_) {
    released_.reset();
  } else {
    thread_state_.emplace();
  }
  struct ReleaseAgain {
    std::optional<nb::gil_scoped_release>& released;
    ~ReleaseAgain() { released.emplace(); }
  } release_again{released_};
  return ask(layer) && !cancelled;
}

void PyGate::finish() {
  if (!released_ || !nb::is_alive()) return;
  released_.reset();
  thread_state_.reset();
}

}  // namespace llmdd::bindings
