#include "engine/nixl_library.h"

#include <dlfcn.h>

#include "common/status.h"

namespace llmdd {
namespace {

class Loader {
 public:
  explicit Loader(const std::string& path)
      : path_(path), library_(::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) fail(::dlerror());
  }

  template <typename Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(::dlsym(library_, name));
    if (function == nullptr) fail(std::string("it has no ") + name);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(Status::kFeatureNotEnabled, "NIXL cannot be loaded from " + path_ + ": " + why +
                                                "; pip install --force-reinstall 'nixl>=1.5'");
  }

  const std::string path_;
  void* const library_;
};

}  // namespace

std::shared_ptr<const NixlLibrary> NixlLibrary::load(const std::string& path) {
  Loader loader(path);
  auto nixl = std::make_shared<NixlLibrary>();
  loader.find(nixl->create_agent, "nixl_capi_create_configured_agent");
  loader.find(nixl->destroy_agent, "nixl_capi_destroy_agent");
  loader.find(nixl->get_plugin_params, "nixl_capi_get_plugin_params");
  loader.find(nixl->destroy_mem_list, "nixl_capi_destroy_mem_list");
  loader.find(nixl->destroy_params, "nixl_capi_destroy_params");
  loader.find(nixl->create_backend, "nixl_capi_create_backend");
  loader.find(nixl->destroy_backend, "nixl_capi_destroy_backend");
  loader.find(nixl->get_local_md, "nixl_capi_get_local_md");
  loader.find(nixl->load_remote_md, "nixl_capi_load_remote_md");
  loader.find(nixl->create_reg_dlist, "nixl_capi_create_reg_dlist");
  loader.find(nixl->destroy_reg_dlist, "nixl_capi_destroy_reg_dlist");
  loader.find(nixl->reg_dlist_add, "nixl_capi_reg_dlist_add_desc");
  loader.find(nixl->register_mem, "nixl_capi_register_mem");
  loader.find(nixl->create_xfer_dlist, "nixl_capi_create_xfer_dlist");
  loader.find(nixl->destroy_xfer_dlist, "nixl_capi_destroy_xfer_dlist");
  loader.find(nixl->xfer_dlist_add, "nixl_capi_xfer_dlist_add_desc");
  loader.find(nixl->create_xfer_req, "nixl_capi_create_xfer_req");
  loader.find(nixl->post_xfer_req, "nixl_capi_post_xfer_req");
  loader.find(nixl->get_xfer_status, "nixl_capi_get_xfer_status");
  loader.find(nixl->release_xfer_req, "nixl_capi_release_xfer_req");
  loader.find(nixl->destroy_xfer_req, "nixl_capi_destroy_xfer_req");
  loader.find(nixl->create_notif_map, "nixl_capi_create_notif_map");
  loader.find(nixl->destroy_notif_map, "nixl_capi_destroy_notif_map");
  loader.find(nixl->notif_map_clear, "nixl_capi_notif_map_clear");
  loader.find(nixl->get_notifs, "nixl_capi_get_notifs");
  return nixl;
}

}  // namespace llmdd
