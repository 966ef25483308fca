#include "mutate/messages.h"

#include "check.h"
#include "mutate/mutator.h"
#include "mutate/targets.h"

namespace llmdd::test {
namespace {

const std::vector<MessageType> kTypes = {
    MessageType::kHello,   MessageType::kWelcome, MessageType::kReject,   MessageType::kIntroduce,
    MessageType::kVerdict, MessageType::kResolve, MessageType::kResolved, MessageType::kFinish,
    MessageType::kPush,    MessageType::kFailure, MessageType::kShare,    MessageType::kWithdraw,
    MessageType::kStage,   MessageType::kFetch};

std::string random_text(Random& random) {
  std::string text(random.one_in(10) ? random.below(1100) : random.below(12), 'x');
  for (char& letter : text) letter = static_cast<char>(random.next());
  return text;
}

HostFacts random_facts(Random& random) {
  return {random_text(random), random.awkward(), static_cast<uint32_t>(random.awkward())};
}

std::vector<uint64_t> random_list(Random& random) {
  std::vector<uint64_t> values(random.below(6));
  for (uint64_t& value : values) value = random.awkward();
  return values;
}

Share random_share(Random& random) {
  Share share{random.below(3), random.awkward(), {}};
  for (uint64_t ranges = random.below(4); ranges > 0; --ranges) {
    share.ranges.push_back({random.awkward(), random.awkward(), random.awkward()});
  }
  return share;
}

Transport random_transport(Random& random) {
  return random.pick<Transport>(
      {Transport::kAuto, Transport::kShm, Transport::kCma, Transport::kNixl});
}

template <typename Message>
void check_round_trip(const Bytes& payload) {
  Bytes again = Message::decode(payload).encode();
  LLMDD_CHECK(again.size() == payload.size());
  LLMDD_CHECK(Message::decode(again).encode() == again);
}

void decode(MessageType type, const Bytes& payload) {
  switch (type) {
    case MessageType::kHello:
      return check_round_trip<Hello>(payload);
    case MessageType::kWelcome:
      return check_round_trip<Welcome>(payload);
    case MessageType::kIntroduce:
      return check_round_trip<Introduce>(payload);
    case MessageType::kResolve:
      return check_round_trip<Resolve>(payload);
    case MessageType::kResolved:
      return check_round_trip<Resolved>(payload);
    case MessageType::kFinish:
      return check_round_trip<Finish>(payload);
    case MessageType::kPush:
      return check_round_trip<Push>(payload);
    case MessageType::kShare:
      return check_round_trip<Share>(payload);
    case MessageType::kWithdraw:
      return check_round_trip<Withdraw>(payload);
    case MessageType::kStage:
      return check_round_trip<Stage>(payload);
    case MessageType::kFetch:
      return check_round_trip<Fetch>(payload);
    default:
      return check_round_trip<Outcome>(payload);
  }
}

}  // namespace

CacheRef random_ref(Random& random) {
  auto kind = static_cast<KeyKind>(random.below(4));
  return {kind, random.below(4), random.below(3), random.below(10)};
}

Push random_push(Random& random, const std::vector<uint64_t>& addrs) {
  Push push;
  push.target = random_ref(random);
  if (random.one_in(2)) push.dst_layers = LayerRange{random.below(2), random.between(1, 3)};
  push.tensors_per_layer = static_cast<uint32_t>(random.between(1, 2));
  push.token = random.one_in(4) ? random.awkward() : 0;
  if (random.one_in(3)) push.dst_addrs = addrs;
  push.to_blocks = !random.one_in(3);
  push.block_bytes = random.pick<uint64_t>({64, 64, 1, 100});
  push.src_bytes = push.to_blocks ? push.block_bytes * random.between(1, 8) : push.block_bytes;
  push.timeout_ms = 60'000;
  push.src_addrs = addrs;
  for (uint64_t runs = random.between(1, 4); runs > 0; --runs) {
    push.runs.push_back({random.below(4), random.below(8), random.between(1, 3)});
  }
  if (!push.to_blocks) push.runs = {{0, 0, 1}};
  return push;
}

Bytes random_payload(MessageType type, Random& random) {
  switch (type) {
    case MessageType::kHello:
      return Hello{random.awkward(),     random.awkward(),
                   random.one_in(2),     static_cast<uint32_t>(random.awkward()),
                   random_facts(random), random_transport(random)}
          .encode();
    case MessageType::kWelcome:
      return Welcome{random.awkward(),         random.one_in(2),    random_facts(random),
                     random_transport(random), random_text(random), {}}
          .encode();
    case MessageType::kIntroduce:
      return Introduce{{}, {}, random.awkward(), random.one_in(2)}.encode();
    case MessageType::kResolve:
      return Resolve{random_ref(random)}.encode();
    case MessageType::kResolved:
      return Resolved{1,    random.below(3),  random.between(3, 9), random.between(1, 99), true,
                      true, random.one_in(2), random_list(random)}
          .encode();
    case MessageType::kFinish:
      return Finish{
          random_ref(random),
          static_cast<int64_t>(random.below(6)),
          {static_cast<uint32_t>(random.below(4)), static_cast<uint32_t>(random.awkward())}}
          .encode();
    case MessageType::kPush:
      return random_push(random, random_list(random)).encode();
    case MessageType::kShare:
      return random_share(random).encode();
    case MessageType::kWithdraw:
      return Withdraw{random.awkward()}.encode();
    case MessageType::kStage:
      return Stage{
          {}, {random.below(1U << 30), uint32_t(random.between(1, 64))}, Bytes(random.below(400))}
          .encode();
    case MessageType::kFetch:
      return Fetch{uint32_t(random.awkward()),
                   {{random.awkward(), random.between(1, 99)}, {random.awkward(), 64}}}
          .encode();
    default:
      return Outcome{static_cast<Status>(random.awkward()), random_text(random)}.encode();
  }
}

std::string try_message(Random& random) {
  MessageType type = random.pick(kTypes);
  Bytes payload = random_payload(type, random);
  decode(type, payload);  // nothing has been changed yet, so it must be well formed
  if (random.one_in(20)) type = random.pick(kTypes);
  mutate(payload, random);
  try {
    decode(type, payload);
  } catch (const WireError& error) {
    return error.what();
  }
  return std::string("well formed, type ") + letter_of(type);
}

}  // namespace llmdd::test
