// The collective links of this process by comm id.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "engine/communicator.h"

namespace llmdd {

class CommTable {
 public:
  explicit CommTable(CommContext context) : context_(std::move(context)) {}

  // Ids start at 1; a refused call uses up none. Throws Error(kParamInvalid).
  int64_t link(CommSpec spec);
  // Both throw Error(kNotYetLink) for an unknown id. A link stays while another communicator or
  // link_clusters made it needed.
  void unlink(int64_t comm_id);
  CommState state(int64_t comm_id) const;
  void close_all();
  bool empty() const;

 private:
  void drop_links(const Communicator& ended);
  bool used(const Link& link) const;

  const CommContext context_;
  mutable std::mutex mutex_;
  int64_t next_id_ = 1;
  std::map<int64_t, std::unique_ptr<Communicator>> comms_;
};

}  // namespace llmdd
