// The collective link(), the listening address and the state of links.
#include "bindings/py_engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace llmdd::bindings {
namespace {

int64_t link_members(PyEngine& self, const std::string& name,
                     const std::vector<std::pair<uint64_t, uint32_t>>& members) {
  return self.get().link_members({name, members});
}

}  // namespace

void bind_members(nb::class_<PyEngine>& engine) {
  engine.def("link_members", &link_members, "name"_a, "members"_a, ReleaseGil())
      .def(
          "unlink_members",
          [](PyEngine& self, int64_t comm_id) { self.get().unlink_members(comm_id); }, "comm_id"_a,
          ReleaseGil())
      .def(
          "comm_state",
          [](PyEngine& self, int64_t id) { return static_cast<int>(self.get().comm_state(id)); },
          "comm_id"_a, ReleaseGil())
      .def(
          "listen",
          [](PyEngine& self, const std::string& ip, uint16_t port) { self.get().listen(ip, port); },
          "listen_ip"_a, "listen_port"_a, ReleaseGil())
      .def(
          "linked", [](PyEngine& self, uint64_t id) { return self.get().linked(id); },
          "cluster_id"_a, ReleaseGil())
      .def(
          "check_link", [](PyEngine& self, uint64_t id) { self.get().check_link(id); },
          "cluster_id"_a, ReleaseGil());
}

}  // namespace llmdd::bindings
