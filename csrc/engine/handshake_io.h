// Frames of the handshake, with the reason of a refusal in either direction.
#pragma once

#include <functional>
#include <string>

#include "common/socket_io.h"
#include "engine/messages.h"

namespace llmdd {

void send_frame(int fd, MessageType type, const Bytes& payload, const WaitLimit& limit);
Frame read_frame(int fd, const WaitLimit& limit, uint32_t max_payload = kMaxHandshakePayload);
// A Reject in place of the expected message carries the peer's reason, which is thrown.
Frame expect(int fd, MessageType type, const WaitLimit& limit);
// A peer that has refused meanwhile has left its reason to be read.
void send_or_learn(int fd, MessageType type, const Bytes& payload, const WaitLimit& limit);
// The peer learns the reason if it still listens; this side's own error is the one that counts.
void try_reject(int fd, Status status, const std::string& text, const WaitLimit& limit);

// The dialling side's last word, and the peer's; `confirm` may throw instead.
void send_verdict(int fd, const WaitLimit& limit, const std::function<void()>& confirm);
void read_verdict(int fd, const WaitLimit& limit);

// Runs `step`; what it throws is told to the peer on `fd` and thrown on.
template <typename Step>
auto or_reject(int fd, const WaitLimit& limit, Step step) {
  try {
    return step();
  } catch (const Error& error) {
    try_reject(fd, error.status(), error.what(), limit);
    throw;
  } catch (const WireError& error) {
    try_reject(fd, Status::kLinkFailed, error.what(), limit);
    throw Error(Status::kLinkFailed, error.what());
  }
}

}  // namespace llmdd
