// Both sides of a handshake whose other side is a script.
#include <sys/socket.h>

#include "check.h"
#include "common/signal_fd.h"
#include "engine/handshake.h"
#include "mutate/messages.h"
#include "mutate/mutator.h"
#include "mutate/targets.h"

namespace llmdd::test {
namespace {

// What the script sends is there before it is waited for, and then comes the end of the stream.
constexpr int64_t kLongMs = 60'000;
const std::vector<MessageType> kTypes = {MessageType::kHello, MessageType::kWelcome,
                                         MessageType::kReject, MessageType::kIntroduce,
                                         MessageType::kVerdict};

Bytes scripted_frame(MessageType type, Random& random) {
  if (random.one_in(20)) type = random.pick(kTypes);
  Bytes payload = random_payload(type, random);
  if (type == MessageType::kHello && !random.one_in(4)) {
    payload = Hello{2, 1, true, 50'000, read_host_facts(), Transport::kAuto}.encode();
  }
  if (type == MessageType::kWelcome && !random.one_in(4)) {
    payload =
        Welcome{2, true, read_host_facts(), Transport::kAuto, "/nowhere/link.sock", {}}.encode();
  }
  if (!random.one_in(3)) mutate(payload, random);
  Bytes frame = encode_frame(type, 0, payload);
  if (random.one_in(8)) mutate(frame, random);
  return frame;
}

// Our end of a stream whose other end has sent all of this and gone.
UniqueFd scripted_peer(const Bytes& script, UniqueFd& other) {
  int fds[2];
  LLMDD_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  other = UniqueFd(fds[1]);
  LLMDD_CHECK(::send(fds[1], script.data(), script.size(), 0) ==
              static_cast<ssize_t>(script.size()));
  ::shutdown(fds[1], SHUT_WR);
  return UniqueFd(fds[0]);
}

// Without the text that the script made up.
std::string own_words(const std::string& sentence) {
  return sentence.substr(0, sentence.find("refused: "));
}

template <typename Handshake>
std::string reason_of(Handshake handshake) {
  try {
    handshake();
  } catch (const Error& error) {
    return own_words(error.what());
  } catch (const WireError& error) {
    return error.what();
  }
  LLMDD_CHECK(!"a script is no peer");
  return "";
}

}  // namespace

std::string try_handshake(Random& random) {
  Identity self{1, true};
  Prober prober;
  SignalFd stop;
  UniqueFd other;
  bool listens = random.one_in(2);
  Bytes script = scripted_frame(listens ? MessageType::kHello : MessageType::kWelcome, random);
  if (random.one_in(2)) {
    Bytes second = scripted_frame(MessageType::kReject, random);
    script.insert(script.end(), second.begin(), second.end());
  }
  UniqueFd stream = scripted_peer(script, other);
  return reason_of([&] {
    if (listens) {
      std::optional<uint64_t> claimed;
      ListenerActions actions{[](Greeted) { LLMDD_CHECK(!"a script is no peer"); },
                              [](uint64_t) { throw Error(Status::kNotYetLink, "no link yet"); },
                              nullptr};
      greet_dialer(self, prober, std::move(stream), stop.fd(), claimed, actions);
    } else {
      WaitLimit limit{Deadline::after_ms(kLongMs), stop.fd()};
      greet_over(self, prober, 2, std::move(stream), limit, [] {});
    }
  });
}

}  // namespace llmdd::test
