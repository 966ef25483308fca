// NIXL's C interface, loaded at run time: an engine that needs no NIXL runs without it.
//
// The declarations are ours. They hold for nixl 1.5 (libnixl_capi.so of the wheels nixl-cu12 and
// nixl-cu13); a library that lacks one of the functions is refused by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace llmdd {

struct NixlLibrary {
  using Handle = void*;  // NIXL's objects, all opaque here

  // In the order of NIXL's own struct.
  struct AgentConfig {
    bool progress_thread = false;
    bool listen_thread = false;
    int listen_port = 0;
    int thread_sync = 1;  // one call at a time ("strict")
    unsigned int num_workers = 0;
    uint64_t progress_delay_us = 0;
    uint64_t listen_delay_us = 0;
    bool telemetry = false;
  };

  static constexpr int kSuccess = 0;
  static constexpr int kInProgress = 1;
  static constexpr int kDram = 0;
  static constexpr int kWrite = 1;

  int (*create_agent)(const char* name, const AgentConfig* config, Handle* agent) = nullptr;
  int (*destroy_agent)(Handle agent) = nullptr;
  int (*get_plugin_params)(Handle agent, const char* plugin, Handle* memories,
                           Handle* params) = nullptr;
  int (*destroy_mem_list)(Handle memories) = nullptr;
  int (*destroy_params)(Handle params) = nullptr;
  int (*create_backend)(Handle agent, const char* plugin, Handle params, Handle* backend) = nullptr;
  int (*destroy_backend)(Handle backend) = nullptr;
  // The bytes come from malloc(3).
  int (*get_local_md)(Handle agent, void** data, size_t* size) = nullptr;
  int (*load_remote_md)(Handle agent, const void* data, size_t size, char** name) = nullptr;
  int (*create_reg_dlist)(int memory, Handle* list, bool sorted) = nullptr;
  int (*destroy_reg_dlist)(Handle list) = nullptr;
  int (*reg_dlist_add)(Handle list, uintptr_t addr, size_t size, uint64_t device,
                       const void* metadata, size_t metadata_size) = nullptr;
  int (*register_mem)(Handle agent, Handle list, Handle options) = nullptr;
  int (*create_xfer_dlist)(int memory, Handle* list, bool sorted) = nullptr;
  int (*destroy_xfer_dlist)(Handle list) = nullptr;
  int (*xfer_dlist_add)(Handle list, uintptr_t addr, size_t size, uint64_t device) = nullptr;
  int (*create_xfer_req)(Handle agent, int operation, Handle local, Handle remote,
                         const char* remote_agent, Handle* request, Handle options) = nullptr;
  int (*post_xfer_req)(Handle agent, Handle request, Handle options) = nullptr;
  int (*get_xfer_status)(Handle agent, Handle request) = nullptr;
  int (*release_xfer_req)(Handle agent, Handle request) = nullptr;
  int (*destroy_xfer_req)(Handle request) = nullptr;
  int (*create_notif_map)(Handle* map) = nullptr;
  int (*destroy_notif_map)(Handle map) = nullptr;
  int (*notif_map_clear)(Handle map) = nullptr;
  int (*get_notifs)(Handle agent, Handle map, Handle options) = nullptr;

  // Loads the shared library at this path; it stays loaded. Throws Error(kFeatureNotEnabled).
  static std::shared_ptr<const NixlLibrary> load(const std::string& path);
};

static_assert(offsetof(NixlLibrary::AgentConfig, thread_sync) == 8);
static_assert(offsetof(NixlLibrary::AgentConfig, telemetry) == 32);

}  // namespace llmdd
