// What the frames of wire.h carry. Every field is checked when decoded; ranges that depend on a
// cache are checked by the service that uses them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/hmac.h"
#include "common/random.h"
#include "common/status.h"
#include "engine/transport.h"
#include "engine/wire.h"
#include "model/block_runs.h"
#include "model/cache_key.h"
#include "model/layer_range.h"
#include "shm/shared_file.h"

namespace llmdd {

// Facts that only help to say why two processes cannot read each other.
struct HostFacts {
  std::string boot_id;  // of the running kernel: differs between hosts
  uint64_t pid_namespace = 0;
  uint32_t pid = 0;  // as its own namespace numbers it
};

HostFacts read_host_facts();

struct Hello {
  uint64_t cluster_id = 0;
  uint64_t wanted_cluster_id = 0;
  bool remote_access = false;
  uint32_t timeout_ms = 0;  // the listening side gives up by then, too
  HostFacts host;
  Transport transport = Transport::kAuto;  // what this side is set to

  Bytes encode() const;
  static Hello decode(const Bytes& payload);
};

struct Welcome {
  uint64_t cluster_id = 0;
  bool remote_access = false;
  HostFacts host;
  Transport transport = Transport::kAuto;  // kNixl: Stage follows on this connection
  std::string socket_path;                 // else the handshake goes on there
  Nonce token{};                           // the dialling side repeats it

  Bytes encode() const;
  static Welcome decode(const Bytes& payload);
};

// Sent by both sides on the Unix socket: `nonce` lies at `nonce_addr` in the sender's memory, and
// the receiver proves with it that it reads the memory of the process it talks to.
struct Introduce {
  Nonce token{};
  Nonce nonce{};
  uint64_t nonce_addr = 0;
  bool maps_shared = false;  // the sender copies from shared memory where it is offered some

  Bytes encode() const;
  static Introduce decode(const Bytes& payload);
};

// Memory that a peer writes into, cut in slots of kSlotBytes.
struct SlabFacts {
  uint64_t addr = 0;
  uint32_t num_slots = 0;
};

// Sent by both sides of a link over NIXL.
struct Stage {
  Nonce token{};
  SlabFacts slab;
  Bytes metadata;  // of the sender's NIXL agent
  Digest proof{};  // that the sender knows the listening side's link secret

  // `answered`: the proof of the dialling side's Stage, for the listening side's.
  Digest prove(const std::string& secret, const Digest* answered = nullptr) const;
  Bytes encode() const;
  static Stage decode(const Bytes& payload);
};

// kReject, kVerdict and kFailure.
struct Outcome {
  Status status = Status::kSuccess;
  std::string text;

  // The status of something that went wrong, also when the peer claims success.
  Status failure() const { return status == Status::kSuccess ? Status::kFailed : status; }
  Bytes encode() const;
  static Outcome decode(const Bytes& payload);
};

struct Resolve {
  CacheRef ref;

  Bytes encode() const;
  static Resolve decode(const Bytes& payload);
};

struct Resolved {
  int64_t cache_id = 0;
  uint64_t row = 0;
  uint64_t rows = 0;
  uint64_t stride = 0;
  bool is_blocks = false;
  bool remote_accessible = false;
  bool host_placed = false;
  std::vector<uint64_t> tensor_addrs;

  Bytes encode() const;
  static Resolved decode(const Bytes& payload);
};

struct Finish {
  CacheRef ref;
  int64_t cache_id = 0;
  TensorRange tensors;

  Bytes encode() const;
  static Finish decode(const Bytes& payload);
};

// Blocks, or one row, go from the sender's tensors to the receiver's. The bytes at each source
// address are cut in blocks of `block_bytes`, the last of which may be shorter; runs count in
// those.
//
// The destination is what the receiver's own cache table names for `target`; or, in message mode
// only, `dst_addrs`, one for each source address, which must lie in registered memory. With a token
// the runs' destinations are positions in the receiver's reservation.
struct Push {
  CacheRef target;
  std::optional<LayerRange> dst_layers;
  uint32_t tensors_per_layer = 0;
  uint64_t token = 0;  // 0: none
  std::vector<uint64_t> dst_addrs;
  bool to_blocks = false;  // else to the row that `target` names, as one run
  uint64_t src_bytes = 0;
  uint64_t block_bytes = 0;
  uint32_t timeout_ms = 0;
  std::vector<uint64_t> src_addrs;
  std::vector<BlockRun> runs;

  Bytes encode() const;
  static Push decode(const Bytes& payload);
};

struct Share {
  uint64_t file_id = 0;
  uint64_t size = 0;
  std::vector<SharedRange> ranges;

  Bytes encode() const;
  static Share decode(const Bytes& payload);
};

struct Withdraw {
  uint64_t file_id = 0;

  Bytes encode() const;
  static Withdraw decode(const Bytes& payload);
};

// Bytes of the receiver's registered memory, one piece behind the other, go to the start of a slot
// of the sender's staging memory.
struct Fetch {
  struct Piece {
    uint64_t addr = 0;
    uint64_t length = 0;
  };

  uint32_t slot = 0;
  std::vector<Piece> pieces;

  uint64_t bytes() const;
  Bytes encode() const;
  static Fetch decode(const Bytes& payload);
};

}  // namespace llmdd
