#include "bindings/bind.h"

NB_MODULE(_engine, module) {
  module.doc() = "Native host engine of vllm_llmdd_connector.datadist; see csrc/.";
  llmdd::bindings::bind_errors(module);
  llmdd::bindings::bind_engine(module);
  llmdd::bindings::bind_layers(module);
  llmdd::bindings::bind_testing(module);
}
