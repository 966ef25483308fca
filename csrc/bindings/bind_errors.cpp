// Error -> EngineError(message, code), and log sentences -> Python's logging.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdio>
#include <string>

#include "bindings/bind.h"
#include "common/log.h"
#include "common/status.h"
#include "engine/wire.h"

namespace nb = nanobind;

namespace llmdd::bindings {
namespace {

// Borrowed by the translator; the module owns it.
PyObject* g_engine_error = nullptr;

void raise(const char* message, Status status) {
  nb::object arguments = nb::make_tuple(message, static_cast<uint32_t>(status));
  PyErr_SetObject(g_engine_error, arguments.ptr());
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    raise(error.what(), error.status());
  } catch (const WireError& error) {
    raise(error.what(), Status::kLinkFailed);
  }
}

// Called on any thread of the engine, never with one of its mutexes held.
void log_to_python(LogLevel level, const std::string& sentence) {
  if (!nb::is_alive()) return;
  nb::gil_scoped_acquire gil;
  try {
    nb::object logger =
        nb::module_::import_("logging").attr("getLogger")("vllm_llmdd_connector.datadist");
    logger.attr("log")(static_cast<int>(level), "%s", sentence);
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("vllm_llmdd_connector.datadist engine log");
  } catch (const std::exception&) {
    // Callers are destructors and ends of threads, too.
  }
}

}  // namespace

void bind_errors(nb::module_& module) {
  g_engine_error = PyErr_NewExceptionWithDoc(
      "vllm_llmdd_connector.datadist._engine.EngineError",
      "A refused or failed engine call; args are the sentence and the LLMStatusCode value.",
      PyExc_RuntimeError, nullptr);
  module.attr("EngineError") = nb::steal(g_engine_error);
  Py_INCREF(g_engine_error);
  nb::register_exception_translator(translate);
  set_log_sink(log_to_python);
}

}  // namespace llmdd::bindings
