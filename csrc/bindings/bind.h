// One function per part of the module; module.cpp calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace llmdd::bindings {

void bind_errors(nanobind::module_& module);
void bind_engine(nanobind::module_& module);
// Layer-wise transfers; after bind_engine.
void bind_layers(nanobind::module_& module);
// Pieces of the engine by themselves, for tests/native.
void bind_testing(nanobind::module_& module);

}  // namespace llmdd::bindings
