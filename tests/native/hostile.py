"""A peer that speaks the protocol by hand, so that it can break it at any point."""

from __future__ import annotations

import ctypes
import os
import socket
import struct

from native import wire

_BOUND_S = 30.0


class Hostile:
    """Links to an engine as a real peer would; then everything is allowed."""

    def __init__(self, cluster_id: int, wanted: int, port: int, *, remote: bool = True) -> None:
        self.memory = ctypes.create_string_buffer(os.urandom(4096), 4096)
        self.addr = ctypes.addressof(self.memory)
        self.tcp = socket.create_connection(("127.0.0.1", port), _BOUND_S)
        self.tcp.sendall(wire.frame(wire.HELLO, wire.hello(cluster_id, wanted, remote=remote)))
        kind, _, payload = read_frame(self.tcp)
        assert kind == wire.WELCOME, payload
        self.path, self.token = self._parse_welcome(payload)
        self.link = socket.socket(socket.AF_UNIX)
        self.link.settimeout(_BOUND_S)

    @staticmethod
    def _parse_welcome(payload: bytes) -> tuple[str, bytes]:
        at = 9
        (boot,) = struct.unpack_from("<H", payload, at)
        at += 2 + boot + 12 + 1
        (size,) = struct.unpack_from("<H", payload, at)
        path = payload[at + 2 : at + 2 + size]
        return path.decode(), payload[-16:]

    def introduce(self) -> None:
        nonce = bytes(self.memory[:16])
        self.link.connect(self.path)
        self.send(wire.INTRODUCE, wire.introduce(self.token, nonce, self.addr))

    def complete(self) -> None:
        """The rest of the handshake, as a real peer does it."""
        self.introduce()
        kind, _, payload = read_frame(self.link)
        assert kind == wire.INTRODUCE, payload
        self.send(wire.VERDICT, wire.outcome(0))
        kind, _, payload = read_frame(self.link)
        assert (kind, payload) == (wire.VERDICT, wire.outcome(0))

    def send(self, kind: int, payload: bytes = b"", call_id: int = 0) -> None:
        self.link.sendall(wire.frame(kind, payload, call_id))

    def send_with_fds(self, kind: int, payload: bytes, fds: list[int]) -> None:
        socket.send_fds(self.link, [wire.frame(kind, payload)], fds)

    def ask(self, kind: int, payload: bytes) -> tuple[int, bytes]:
        """A request's answer: message type and payload."""
        self.send(kind, payload, 5)
        answer, call_id, content = read_frame(self.link)
        assert call_id == 5
        return answer, content

    def is_dropped(self) -> bool:
        """Waits for the engine to end the link."""
        try:
            while self.link.recv(4096):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.link.close()
        self.tcp.close()


def read_exact(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def read_frame(sock: socket.socket) -> tuple[int, int, bytes]:
    """Message type, call id and payload."""
    _, _, kind, size, _, call_id = wire.HEADER.unpack(read_exact(sock, wire.HEADER.size))
    return kind, call_id, read_exact(sock, size)


def status_in(payload: bytes) -> int:
    return int(struct.unpack_from("<I", payload)[0])
