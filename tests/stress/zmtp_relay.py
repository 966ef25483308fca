"""A relay between D's and P's control ports that loses, delays and cuts.

It reads ZMTP's frames (rfc.zeromq.org/spec/23), so that a message is lost whole and the connection
goes on. It always listens at one port, so that P's successor has P's address.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

HOST = "127.0.0.1"
_GREETING_BYTES = 64
_MORE, _LONG, _COMMAND = 1, 2, 4


class Relay:
    """One port; ``target`` is where connections go, 0: they are closed at once."""

    def __init__(self, seed: int) -> None:
        self.target = 0
        self.loss = 0.0
        """Share of messages that are lost."""
        self.delay_s = 0.0
        """The longest delay of a message."""
        self._dice = random.Random(seed)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """End every connection."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((HOST, self.target))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        """One direction of a connection; its end ends the other direction, too."""
        with contextlib.suppress(OSError, EOFError):
            for _ in range(_GREETING_BYTES):  # each side waits for the begin of the other's
                target.sendall(_read(source, 1))
            while True:
                message, is_command = _read_message(source)
                if not is_command and self._dice.random() < self.loss:
                    continue
                if self.delay_s:
                    time.sleep(self._dice.uniform(0, self.delay_s))
                target.sendall(message)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()
        with self._lock:
            self._sockets.discard(source)


def _read_message(source: socket.socket) -> tuple[bytes, bool]:
    """All frames of one message or one command, and whether it is a command."""
    message = b""
    while True:
        flags = _read(source, 1)
        size = _read(source, 8 if flags[0] & _LONG else 1)
        message += flags + size + _read(source, int.from_bytes(size, "big"))
        if not flags[0] & _MORE:
            return message, bool(flags[0] & _COMMAND)


def _read(source: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts
