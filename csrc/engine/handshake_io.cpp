#include "engine/handshake_io.h"

#include <array>

#include "common/log.h"

namespace llmdd {

void send_frame(int fd, MessageType type, const Bytes& payload, const WaitLimit& limit) {
  Bytes frame = encode_frame(type, 0, payload);
  write_all(fd, frame.data(), frame.size(), limit);
}

Frame read_frame(int fd, const WaitLimit& limit, uint32_t max_payload) {
  std::array<uint8_t, kFrameHeaderBytes> bytes;
  read_exact(fd, bytes.data(), bytes.size(), limit);
  FrameHeader header = decode_header(bytes.data(), max_payload);
  Frame frame{header.type, header.call_id, Bytes(header.payload_bytes)};
  read_exact(fd, frame.payload.data(), frame.payload.size(), limit);
  return frame;
}

Frame expect(int fd, MessageType type, const WaitLimit& limit) {
  Frame frame =
      read_frame(fd, limit, type == MessageType::kStage ? kMaxStagePayload : kMaxHandshakePayload);
  if (frame.type == MessageType::kReject) {
    Outcome outcome = Outcome::decode(frame.payload);
    throw Error(outcome.failure(), "the peer refused: " + outcome.text);
  }
  if (frame.type != type) {
    throw WireError("unexpected message type " + std::to_string(int(frame.type)) +
                    " during the handshake");
  }
  return frame;
}

void send_or_learn(int fd, MessageType type, const Bytes& payload, const WaitLimit& limit) {
  try {
    send_frame(fd, type, payload, limit);
  } catch (const Error&) {
    expect(fd, MessageType::kReject, limit);
    throw;
  }
}

void try_reject(int fd, Status status, const std::string& text, const WaitLimit& limit) {
  try {
    send_frame(fd, MessageType::kReject, Outcome{status, text}.encode(), limit);
  } catch (const Error&) {
    log(LogLevel::kDebug, "the peer left before it was told: " + text);
  }
}

void send_verdict(int fd, const WaitLimit& limit, const std::function<void()>& confirm) {
  confirm();
  send_or_learn(fd, MessageType::kVerdict, Outcome{}.encode(), limit);
}

void read_verdict(int fd, const WaitLimit& limit) {
  Outcome verdict = Outcome::decode(expect(fd, MessageType::kVerdict, limit).payload);
  if (verdict.status != Status::kSuccess) {
    throw Error(verdict.failure(), "the peer refused: " + verdict.text);
  }
}

}  // namespace llmdd
