"""Sockets and threads of the control plane: ZMQ ROUTER where P listens, DEALER where D dials.

All protocol decisions are elsewhere (``session.py``, ``Producer``); this file moves frames, bounds
their size and number, and sleeps in ``poll`` when there is nothing to do. With a ``KeySet`` both
sides prove that they have its keys, and everything is encrypted (CURVE).
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_llmdd_connector.control.gate import HANDSHAKE_FAILED, Gatekeeper, RateLimit
from vllm_llmdd_connector.control.keys import KeySet
from vllm_llmdd_connector.control.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REQUEST_BYTES,
    AnyMessage,
    Message,
    decode,
    encode,
)
from vllm_llmdd_connector.control.ports import describe_holder
from vllm_llmdd_connector.deadlines import KEEPALIVE_PROBES, KEEPALIVE_S
from vllm_llmdd_connector.errors import ConfigError, LinkError, RemoteProtocolError
from vllm_llmdd_connector.log import get_logger

logger = get_logger(__name__)

_MAX_BATCH = 64
_LOST_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | HANDSHAKE_FAILED
_PEER = b""
_MAX_SOCKETS = 8192


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


class Sleeper:
    """Where a thread sleeps until a socket can be read or another thread wakes it.

    ``wake`` is for any thread, the rest for the one that sleeps.
    """

    def __init__(self) -> None:
        self._wake = Wake()
        self._poller = zmq.Poller()
        self._poller.register(self._wake.fileno(), zmq.POLLIN)

    def wake(self) -> None:
        self._wake.set()

    def watch(self, *sockets: "zmq.Socket[bytes]") -> None:
        """Wake up for these, too."""
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def ignore(self, *sockets: "zmq.Socket[bytes]") -> None:
        """Not any more; before they are closed."""
        for socket in sockets:
            self._poller.unregister(socket)

    def sleep(self, timeout_ms: int | None = None) -> None:
        """Returns at the timeout at the latest; without one it may sleep for ever."""
        self._poller.poll(timeout_ms)
        self._wake.clear()

    def close(self) -> None:
        self._wake.close()


def new_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """A context with room for the connections to as many peers as there may be."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # By itself ZMQ stops at 1,023, of which a connection with its monitor takes three.
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


def tcp_url(host: str, port: int) -> str:
    """ZMQ's spelling of an address."""
    return f"tcp://{host}:{port}"


def _bounded(
    socket: zmq.Socket[bytes], host: str, max_bytes: int, keepalive_s: int
) -> zmq.Socket[bytes]:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    # A machine that went away without a word is noticed where nothing is being sent, too.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, keepalive_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, keepalive_s)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
    # While something is sent that nobody acknowledges, TCP does not probe but sends it again, for
    # a quarter of an hour by itself.
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * keepalive_s * (1 + KEEPALIVE_PROBES))
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

    def __init__(
        self,
        name: str,
        host: str,
        port: int,
        count_junk: Callable[[], None],
        keys: KeySet | None = None,
        keepalive_s: int = KEEPALIVE_S,
    ) -> None:
        """``count_junk``: told of each message or connection that was not taken. Without ``keys``
        everybody who reaches the port may talk. ``keepalive_s`` as ``KEEPALIVE_S``.

        Raises:
            ConfigError: the port is taken, or the address is not of this machine.
        """
        self._name = name
        self._count_junk = count_junk
        self._limit = RateLimit()
        self._warned: set[str] = set()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = _bounded(
            self._context.socket(zmq.ROUTER), host, MAX_REQUEST_BYTES, keepalive_s
        )
        self._gatekeeper: Gatekeeper | None = None
        if keys is not None:
            self._gatekeeper = Gatekeeper(self._context, self._socket, keys)
        try:
            self._socket.bind(tcp_url(host, port))
        except zmq.ZMQError as error:
            self._close_sockets()
            self._context.term()
            raise ConfigError(_bind_error(host, port, error)) from None
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._wake = Wake()
        # Of the socket, which answers are sent on by the thread that has them.
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
        self._close_sockets()
        self._context.term()
        self._wake.close()

    def _close_sockets(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._socket.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        # Its descriptor, because other threads use the socket while this one sleeps. That tells of
        # changes only, so the socket is read until it is empty.
        poller.register(self._socket.FD, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        if self._gatekeeper is not None:
            poller.register(self._gatekeeper.questions, zmq.POLLIN)
            poller.register(self._gatekeeper.failures, zmq.POLLIN)
        is_empty = False
        while not self._stopping:
            poller.poll(None if is_empty else 0)
            self._wake.clear()
            if self._gatekeeper is not None:
                self._note_refused(self._gatekeeper.answer())
            is_empty = self._receive_some()

    def _note_refused(self, num_failed: int) -> None:
        for _ in range(num_failed):
            self._count_junk()
        if num_failed:
            self._warn_once("a connection without a key of keys_dir was refused")

    def _warn_once(self, what: str) -> None:
        """Strangers can do it as often as they like, and are to write no log."""
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s: %s; others are only counted (junk_messages)", self._name, what)

    def _receive_some(self) -> bool:
        """Whether there is nothing more to read. A bounded number, so that one peer's flood does
        not keep others from being let in."""
        now_s = time.monotonic()
        for _ in range(_MAX_BATCH):
            try:
                with self._lock:
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            if not self._limit.allows(frames[0], sum(map(len, frames)), now_s):
                self._count_junk()
                self._warn_once("messages of a peer that sends too many were dropped")
            elif len(frames) != 2:
                self._drop_junk(f"{len(frames) - 1} frames instead of 1")
            else:
                self._handle(frames[0], frames[1])
        return False

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
        frames = [identity, encode(message)]
        if threading.current_thread() is self._thread:
            self._limit.charge_answer(identity)
        with self._lock:
            # Under the lock: other threads may still answer while ``close`` ends the socket.
            if self._stopping:
                return
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError as error:
                # The peer is gone or does not read; its own deadline tells it.
                logger.debug("%s: answer not sent: %s", self._name, error)
            if threading.current_thread() is not self._thread:
                # Sending may have taken in the news of a message that the thread sleeps for.
                self._wake.set()


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> str:
    if error.errno == zmq.EADDRINUSE:
        return (
            f"control port {port} on {host} is in use by {describe_holder(port)}; "
            "stop it or set control_port to another port (0 picks a free one)"
        )
    return f"cannot listen on {host}:{port}: {error}; set host to an address of this machine"


class Dialer:
    """One DEALER connection to a ``Server``, for use by one thread.

    A ``Sleeper`` watches ``socket`` and ``monitor``; then call ``receive`` and ``was_lost``. What
    cannot even be an address raises ``LinkError`` at construction.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        host: str,
        port: int,
        keys: KeySet | None = None,
        keepalive_s: int = KEEPALIVE_S,
    ) -> None:
        """With ``keys`` only a server of the same set is talked to. ``keepalive_s`` as
        ``KEEPALIVE_S``: a peer whose machine vanishes is lost after four times that."""
        self.address = (host, port)
        self._has_more = False
        self._limit = RateLimit()
        self._is_refused = False
        try:
            dealer = context.socket(zmq.DEALER)
            self.socket = _bounded(dealer, host, MAX_MESSAGE_BYTES, keepalive_s)
        except zmq.ZMQError as error:
            raise LinkError(f"cannot dial {host}:{port}: {error}") from None
        if keys is not None:
            self.socket.curve_serverkey = keys.listen.public
            self.socket.curve_publickey = keys.dial.public
            self.socket.curve_secretkey = keys.dial.secret
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
        """What has arrived, and the number of messages that made no sense or were too many.

        A bounded number, so that a peer's flood does not keep its reader from anything else; the
        sleeper wakes up at once for the rest.
        """
        messages: list[AnyMessage] = []
        num_junk = 0
        self._has_more = False
        now_s = time.monotonic()
        for _ in range(_MAX_BATCH):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if not self._limit.allows(_PEER, sum(map(len, frames)), now_s):
                num_junk += 1
                continue
            try:
                messages.append(decode(b"".join(frames)))
            except RemoteProtocolError as error:
                num_junk += 1
                logger.debug("peer %s:%d: message dropped: %s", *self.address, error)
        else:
            self._has_more = True
        return messages, num_junk

    def was_lost(self) -> bool:
        """Whether the connection broke or was refused since the last call.

        What the peer said before counts: not while ``receive`` may have left some of it.
        """
        if self._has_more:
            return False
        lost = False
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            self._is_refused |= bool(event & HANDSHAKE_FAILED)
            lost = True
        return lost

    @property
    def loss(self) -> str:
        """Why ``was_lost`` was true, as a sentence's part."""
        how = "was refused or lost"
        if self._is_refused:
            how = (
                "ended in its handshake; if the other server is up, see that keys_dir of both "
                "names the same keys, or none"
            )
        return "the control connection to {}:{} {}".format(*self.address, how)

    def close(self, linger_s: float = 0.0) -> None:
        """Drop the connection; what was not sent is tried for ``linger_s`` more while the context
        ends. Idempotent."""
        if self.socket.closed:
            return
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=int(linger_s * 1000))
