#include "engine/messages.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "engine/staging_slab.h"

namespace llmdd {
namespace {

constexpr size_t kBlockRunBytes = 3 * sizeof(uint64_t);
constexpr size_t kSharedRangeBytes = 3 * sizeof(uint64_t);
constexpr size_t kPieceBytes = 2 * sizeof(uint64_t);
constexpr uint32_t kMaxSlots = 1U << 16;

void write_host(WireWriter& writer, const HostFacts& host) {
  writer.text(host.boot_id);
  writer.u64(host.pid_namespace);
  writer.u32(host.pid);
}

HostFacts read_host(WireReader& reader) {
  HostFacts host;
  host.boot_id = reader.text();
  host.pid_namespace = reader.u64();
  host.pid = reader.u32();
  return host;
}

Transport read_transport(WireReader& reader) {
  uint8_t number = reader.u8();
  if (!is_transport(number)) throw WireError("unknown transport " + std::to_string(number));
  return static_cast<Transport>(number);
}

void write_ref(WireWriter& writer, const CacheRef& ref) {
  writer.u8(static_cast<uint8_t>(ref.kind));
  writer.u64(ref.id);
  writer.u64(ref.model_id);
  writer.u64(ref.row);
}

CacheRef read_ref(WireReader& reader) {
  CacheRef ref;
  uint8_t kind = reader.u8();
  if (kind > static_cast<uint8_t>(KeyKind::kIdAndIndex)) {
    throw WireError("unknown kind of cache key " + std::to_string(kind));
  }
  ref.kind = static_cast<KeyKind>(kind);
  ref.id = reader.u64();
  ref.model_id = reader.u64();
  ref.row = reader.u64();
  return ref;
}

void write_nonce(WireWriter& writer, const Nonce& nonce) { writer.raw(nonce.data(), nonce.size()); }

Nonce read_nonce(WireReader& reader) {
  Nonce nonce{};
  reader.raw(nonce.data(), nonce.size());
  return nonce;
}

// All but the proof.
void write_stage(WireWriter& writer, const Stage& stage) {
  write_nonce(writer, stage.token);
  writer.u64(stage.slab.addr);
  writer.u32(stage.slab.num_slots);
  writer.u32(static_cast<uint32_t>(stage.metadata.size()));
  writer.raw(stage.metadata.data(), stage.metadata.size());
}

void write_layers(WireWriter& writer, const std::optional<LayerRange>& layers) {
  writer.u8(layers ? 1 : 0);
  writer.u64(layers ? layers->start : 0);
  writer.u64(layers ? layers->stop : 0);
}

std::optional<LayerRange> read_layers(WireReader& reader) {
  bool present = reader.flag();
  LayerRange layers{reader.u64(), reader.u64()};
  return present ? std::optional(layers) : std::nullopt;
}

void write_runs(WireWriter& writer, const std::vector<BlockRun>& runs) {
  writer.u32(static_cast<uint32_t>(runs.size()));
  for (const BlockRun& run : runs) {
    writer.u64(run.src);
    writer.u64(run.dst);
    writer.u64(run.count);
  }
}

std::vector<BlockRun> read_runs(WireReader& reader) {
  std::vector<BlockRun> runs(reader.count(kBlockRunBytes));
  for (BlockRun& run : runs) {
    run.src = reader.u64();
    run.dst = reader.u64();
    run.count = reader.u64();
  }
  return runs;
}

}  // namespace

HostFacts read_host_facts() {
  HostFacts host;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> host.boot_id;
  struct stat info{};
  if (::stat("/proc/self/ns/pid", &info) == 0) host.pid_namespace = info.st_ino;
  host.pid = static_cast<uint32_t>(::getpid());
  return host;
}

Bytes Hello::encode() const {
  WireWriter writer;
  writer.u64(cluster_id);
  writer.u64(wanted_cluster_id);
  writer.u8(remote_access ? 1 : 0);
  writer.u32(timeout_ms);
  write_host(writer, host);
  writer.u8(static_cast<uint8_t>(transport));
  return writer.take();
}

Hello Hello::decode(const Bytes& payload) {
  WireReader reader(payload);
  Hello hello;
  hello.cluster_id = reader.u64();
  hello.wanted_cluster_id = reader.u64();
  hello.remote_access = reader.flag();
  hello.timeout_ms = reader.u32();
  hello.host = read_host(reader);
  hello.transport = read_transport(reader);
  reader.expect_end();
  return hello;
}

Bytes Welcome::encode() const {
  WireWriter writer;
  writer.u64(cluster_id);
  writer.u8(remote_access ? 1 : 0);
  write_host(writer, host);
  writer.u8(static_cast<uint8_t>(transport));
  writer.text(socket_path);
  write_nonce(writer, token);
  return writer.take();
}

Welcome Welcome::decode(const Bytes& payload) {
  WireReader reader(payload);
  Welcome welcome;
  welcome.cluster_id = reader.u64();
  welcome.remote_access = reader.flag();
  welcome.host = read_host(reader);
  welcome.transport = read_transport(reader);
  welcome.socket_path = reader.text();
  welcome.token = read_nonce(reader);
  reader.expect_end();
  return welcome;
}

Bytes Introduce::encode() const {
  WireWriter writer;
  write_nonce(writer, token);
  write_nonce(writer, nonce);
  writer.u64(nonce_addr);
  writer.u8(maps_shared ? 1 : 0);
  return writer.take();
}

Introduce Introduce::decode(const Bytes& payload) {
  WireReader reader(payload);
  Introduce introduce;
  introduce.token = read_nonce(reader);
  introduce.nonce = read_nonce(reader);
  introduce.nonce_addr = reader.u64();
  introduce.maps_shared = reader.flag();
  reader.expect_end();
  return introduce;
}

// Fresh for each handshake: the token is the listening side's, and each side's metadata names an
// agent that was made for this link.
Digest Stage::prove(const std::string& secret, const Digest* answered) const {
  WireWriter writer;
  write_stage(writer, *this);
  if (answered != nullptr) writer.raw(answered->data(), answered->size());
  return hmac_sha256(secret, writer.take());
}

Bytes Stage::encode() const {
  WireWriter writer;
  write_stage(writer, *this);
  writer.raw(proof.data(), proof.size());
  return writer.take();
}

Stage Stage::decode(const Bytes& payload) {
  WireReader reader(payload);
  Stage stage;
  stage.token = read_nonce(reader);
  stage.slab.addr = reader.u64();
  stage.slab.num_slots = reader.u32();
  stage.metadata.resize(reader.count(1));
  reader.raw(stage.metadata.data(), stage.metadata.size());
  reader.raw(stage.proof.data(), stage.proof.size());
  reader.expect_end();
  uint64_t end = 0;
  if (stage.slab.num_slots == 0 || stage.slab.num_slots > kMaxSlots ||
      __builtin_add_overflow(stage.slab.addr, stage.slab.num_slots * kSlotBytes, &end)) {
    throw WireError("the peer describes staging memory that cannot exist");
  }
  return stage;
}

uint64_t Fetch::bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.length;
  return bytes;
}

Bytes Fetch::encode() const {
  WireWriter writer;
  writer.u32(slot);
  writer.u32(static_cast<uint32_t>(pieces.size()));
  for (const Piece& piece : pieces) {
    writer.u64(piece.addr);
    writer.u64(piece.length);
  }
  return writer.take();
}

Fetch Fetch::decode(const Bytes& payload) {
  WireReader reader(payload);
  Fetch fetch;
  fetch.slot = reader.u32();
  fetch.pieces.resize(reader.count(kPieceBytes));
  uint64_t bytes = 0;
  for (Piece& piece : fetch.pieces) {
    piece.addr = reader.u64();
    piece.length = reader.u64();
    if (piece.length == 0 || piece.length > kSlotBytes) throw WireError("a piece of no slot");
    bytes += piece.length;
  }
  reader.expect_end();
  if (bytes == 0 || bytes > kSlotBytes) {
    throw WireError("a fetch of " + std::to_string(bytes) + " bytes, a slot has " +
                    std::to_string(kSlotBytes));
  }
  return fetch;
}

Bytes Outcome::encode() const {
  WireWriter writer;
  writer.u32(static_cast<uint32_t>(status));
  writer.text(text);
  return writer.take();
}

Outcome Outcome::decode(const Bytes& payload) {
  WireReader reader(payload);
  Outcome outcome;
  outcome.status = static_cast<Status>(reader.u32());
  outcome.text = reader.text();
  reader.expect_end();
  return outcome;
}

Bytes Resolve::encode() const {
  WireWriter writer;
  write_ref(writer, ref);
  return writer.take();
}

Resolve Resolve::decode(const Bytes& payload) {
  WireReader reader(payload);
  Resolve resolve{read_ref(reader)};
  reader.expect_end();
  return resolve;
}

Bytes Resolved::encode() const {
  WireWriter writer;
  writer.u64(static_cast<uint64_t>(cache_id));
  writer.u64(row);
  writer.u64(rows);
  writer.u64(stride);
  writer.u8(is_blocks ? 1 : 0);
  writer.u8(remote_accessible ? 1 : 0);
  writer.u8(host_placed ? 1 : 0);
  writer.u64_list(tensor_addrs);
  return writer.take();
}

Resolved Resolved::decode(const Bytes& payload) {
  WireReader reader(payload);
  Resolved resolved;
  resolved.cache_id = static_cast<int64_t>(reader.u64());
  resolved.row = reader.u64();
  resolved.rows = reader.u64();
  resolved.stride = reader.u64();
  resolved.is_blocks = reader.flag();
  resolved.remote_accessible = reader.flag();
  resolved.host_placed = reader.flag();
  resolved.tensor_addrs = reader.u64_list();
  reader.expect_end();
  uint64_t bytes = 0;
  if (resolved.row >= resolved.rows || resolved.stride == 0 ||
      __builtin_mul_overflow(resolved.rows, resolved.stride, &bytes)) {
    throw WireError("the peer describes a cache that cannot exist");
  }
  return resolved;
}

Bytes Finish::encode() const {
  WireWriter writer;
  write_ref(writer, ref);
  writer.u64(static_cast<uint64_t>(cache_id));
  writer.u32(tensors.first);
  writer.u32(tensors.count);
  return writer.take();
}

Finish Finish::decode(const Bytes& payload) {
  WireReader reader(payload);
  Finish finish;
  finish.ref = read_ref(reader);
  finish.cache_id = static_cast<int64_t>(reader.u64());
  finish.tensors.first = reader.u32();
  finish.tensors.count = reader.u32();
  reader.expect_end();
  return finish;
}

Bytes Push::encode() const {
  WireWriter writer;
  write_ref(writer, target);
  write_layers(writer, dst_layers);
  writer.u32(tensors_per_layer);
  writer.u64(token);
  writer.u64_list(dst_addrs);
  writer.u8(to_blocks ? 1 : 0);
  writer.u64(src_bytes);
  writer.u64(block_bytes);
  writer.u32(timeout_ms);
  writer.u64_list(src_addrs);
  write_runs(writer, runs);
  return writer.take();
}

Push Push::decode(const Bytes& payload) {
  WireReader reader(payload);
  Push push;
  push.target = read_ref(reader);
  push.dst_layers = read_layers(reader);
  push.tensors_per_layer = reader.u32();
  push.token = reader.u64();
  push.dst_addrs = reader.u64_list();
  push.to_blocks = reader.flag();
  push.src_bytes = reader.u64();
  push.block_bytes = reader.u64();
  push.timeout_ms = reader.u32();
  push.src_addrs = reader.u64_list();
  push.runs = read_runs(reader);
  reader.expect_end();
  return push;
}

Bytes Share::encode() const {
  WireWriter writer;
  writer.u64(file_id);
  writer.u64(size);
  writer.u32(static_cast<uint32_t>(ranges.size()));
  for (const SharedRange& range : ranges) {
    writer.u64(range.addr);
    writer.u64(range.length);
    writer.u64(range.offset);
  }
  return writer.take();
}

Share Share::decode(const Bytes& payload) {
  WireReader reader(payload);
  Share share;
  share.file_id = reader.u64();
  share.size = reader.u64();
  share.ranges.resize(reader.count(kSharedRangeBytes));
  for (SharedRange& range : share.ranges) {
    range.addr = reader.u64();
    range.length = reader.u64();
    range.offset = reader.u64();
  }
  reader.expect_end();
  return share;
}

Bytes Withdraw::encode() const {
  WireWriter writer;
  writer.u64(file_id);
  return writer.take();
}

Withdraw Withdraw::decode(const Bytes& payload) {
  WireReader reader(payload);
  Withdraw withdraw{reader.u64()};
  reader.expect_end();
  return withdraw;
}

}  // namespace llmdd
