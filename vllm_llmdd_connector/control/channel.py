"""Sockets and threads of the control plane: ZMQ ROUTER where P listens, DEALER where D dials.

All protocol decisions are elsewhere (``session.py``, ``Producer``); this file moves frames, bounds
their size, and sleeps in ``poll`` when there is nothing to do.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from vllm_llmdd_connector.control.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Message,
    decode,
    encode,
)
from vllm_llmdd_connector.control.ports import describe_holder
from vllm_llmdd_connector.errors import ConfigError, LinkError, RemoteProtocolError
from vllm_llmdd_connector.log import get_logger

logger = get_logger(__name__)

_MAX_BATCH = 64
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED


class Wake:
    """Wakes a thread that sleeps in ``zmq.Poller``; safe to call from any thread."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._fd)


def tcp_url(host: str, port: int) -> str:
    """ZMQ's spelling of an address; IPv6 literals need brackets."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _bounded(socket: zmq.Socket[bytes], host: str) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    return socket


class ServerHandler(Protocol):
    """Answers what arrives at a ``Server``; runs on the server's thread."""

    def __call__(self, message: AnyMessage, reply: Callable[[Message], None]) -> None:
        """Handle one message; ``reply`` sends to its sender, now or later, from any thread."""


class Server:
    """A ROUTER bound to one configured address, with a thread that answers messages.

    The port is taken at construction, so that a conflict stops the start-up; ``start`` runs the
    thread.
    """

    def __init__(self, name: str, host: str, port: int, count_junk: Callable[[], None]) -> None:
        self._name = name
        self._count_junk = count_junk
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _bounded(self._context.socket(zmq.ROUTER), host)
        try:
            self._socket.bind(tcp_url(host, port))
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise ConfigError(_bind_error(host, port, error)) from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._wake = Wake()
        self._outbox: list[tuple[bytes, Message]] = []
        self._lock = threading.Lock()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._handler: ServerHandler | None = None

    def start(self, handler: ServerHandler) -> None:
        """Begin to answer."""
        self._handler = handler
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and give the port back; idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        if self._thread is not None:
            self._wake.set()
            self._thread.join()
        self._socket.close()
        self._context.term()
        self._wake.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._stopping:
            poller.poll()
            self._wake.clear()
            self._receive_some()
            self._send_outbox()

    def _receive_some(self) -> None:
        """A bounded number, so that one peer's flood does not hold back the others' answers."""
        for _ in range(_MAX_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self._drop_junk(f"{len(frames) - 1} frames instead of 1")
                continue
            self._handle(frames[0], frames[1])

    def _handle(self, identity: bytes, frame: bytes) -> None:
        assert self._handler is not None
        try:
            message = decode(frame)
            self._handler(message, lambda answer: self._post(identity, answer))
        except RemoteProtocolError as error:
            self._drop_junk(str(error))
        except Exception:
            logger.exception("%s: a control message could not be handled, dropped", self._name)
            self._count_junk()

    def _drop_junk(self, why: str) -> None:
        self._count_junk()
        logger.debug("%s: message dropped: %s", self._name, why)

    def _post(self, identity: bytes, message: Message) -> None:
        with self._lock:
            # Under the lock: other threads may still answer while ``close`` gives the pipe back.
            if self._stopping:
                return
            self._outbox.append((identity, message))
            if threading.current_thread() is not self._thread:
                self._wake.set()

    def _send_outbox(self) -> None:
        with self._lock:
            outbox, self._outbox = self._outbox, []
        for identity, message in outbox:
            try:
                self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # The peer is gone or does not read; its own deadline tells it.
                logger.debug("%s: answer not sent: %s", self._name, error)


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"control port {port} on {host} is in use by {describe_holder(port)}; "
            "stop it or set control_port to another port (0 picks a free one)"
        )
    return f"cannot listen on {host}:{port}: {error}; set host to an address of this machine"


class Dialer:
    """One DEALER connection to a ``Server``, for use by one thread.

    ``fileno``-style polling: register ``socket`` and ``monitor`` in a poller, then call ``receive``
    and ``was_lost``. What cannot even be an address raises ``LinkError`` at construction.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", host: str, port: int) -> None:
        self.address = (host, port)
        try:
            self.socket = _bounded(context.socket(zmq.DEALER), host)
        except zmq.ZMQError as error:
            raise LinkError(f"cannot dial {host}:{port}: {error}") from None
        self.monitor = self.socket.get_monitor_socket(_LOST_EVENTS)
        try:
            self.socket.connect(tcp_url(host, port))
        except zmq.ZMQError as error:
            self.close()
            raise LinkError(f"cannot dial {host}:{port}: {error}") from None

    def send(self, messages: Sequence[Message]) -> None:
        """Queue messages; what cannot be queued is dropped, the sender has a deadline."""
        for message in messages:
            try:
                self.socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:
                logger.warning("peer %s:%d does not read control messages", *self.address)
                return

    def receive(self) -> tuple[list[AnyMessage], int]:
        """What has arrived, and the number of messages that made no sense."""
        messages: list[AnyMessage] = []
        num_junk = 0
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages, num_junk
            try:
                messages.append(decode(b"".join(frames)))
            except RemoteProtocolError as error:
                num_junk += 1
                logger.debug("peer %s:%d: message dropped: %s", *self.address, error)

    def was_lost(self) -> bool:
        """Whether the connection broke or was refused since the last call."""
        lost = False
        while self.monitor.poll(0):
            self.monitor.recv_multipart(zmq.NOBLOCK)
            lost = True
        return lost

    def close(self) -> None:
        """Drop the connection and what was not sent; idempotent."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
