"""Who may talk to a listening socket of the control channel, and how much.

Both halves work for the socket's own thread, which polls their sockets beside its own: an idle
server has no thread that polls for them.
"""

from dataclasses import dataclass

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from vllm_llmdd_connector.control.keys import KeySet

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"llmdd"

HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

UNIT_BYTES = 64
UNITS_PER_S = 20_000
BURST_UNITS = 100_000
"""What one connection may send: a message costs one unit, each ``UNIT_BYTES`` of it and each answer
another. A D with a thousand new requests a second stays below; after a restart of P a D with
ten thousand of them says everything at once."""
MAX_CONNECTIONS = 1024
"""Connections that are told apart; beyond, the one that was silent for longest starts anew."""


class Gatekeeper:
    """Lets only keys of a set in: ZeroMQ asks here for each connection (ZAP, RFC 27).

    Made before its socket is bound, in the socket's context and for its thread.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        guarded: "zmq.Socket[bytes]",
        keys: KeySet,
    ) -> None:
        self._accepted = frozenset(z85.decode(key) for key in keys.accepted)
        guarded.curve_server = True
        guarded.curve_publickey = keys.listen.public
        guarded.curve_secretkey = keys.listen.secret
        guarded.zap_domain = _ZAP_DOMAIN
        # Else ZeroMQ lets everybody in when nobody is there to be asked.
        guarded.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._guarded = guarded
        self.questions = context.socket(zmq.REP)
        self.questions.bind(_ZAP_ENDPOINT)
        self.failures = guarded.get_monitor_socket(HANDSHAKE_FAILED)

    def answer(self) -> int:
        """Answer what was asked; returns how many connections have failed since the last call,
        for a wrong key, without one, or with something else than ZeroMQ."""
        while True:
            try:
                frames = self.questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._answer(frames)
        num_failed = 0
        while self.failures.poll(0):
            parse_monitor_message(self.failures.recv_multipart(zmq.NOBLOCK))
            num_failed += 1
        return num_failed

    def close(self) -> None:
        """Before the guarded socket is closed."""
        self._guarded.disable_monitor()
        self.failures.close(linger=0)
        self.questions.close(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        """Version, question's number, domain, address, identity, mechanism, credentials."""
        version, number, mechanism, *credentials = (*frames[:2], *frames[5:])
        is_known = mechanism == b"CURVE" and self._accepted.issuperset(credentials[:1] or [b""])
        status, user = (b"200", b"llmdd") if is_known else (b"400", b"")
        self.questions.send_multipart([version, number, status, b"", user, b""])


@dataclass(slots=True)
class _Purse:
    units: float
    filled_s: float


class RateLimit:
    """What each connection may still send; the caller passes the time."""

    def __init__(
        self,
        units_per_s: float = UNITS_PER_S,
        burst_units: float = BURST_UNITS,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._units_per_s = units_per_s
        self._burst_units = burst_units
        self._max_connections = max_connections
        self._purses: dict[bytes, _Purse] = {}

    def allows(self, connection: bytes, num_bytes: int, now_s: float) -> bool:
        """Whether a message of this size is to be read."""
        purse = self._purses.pop(connection, None)
        if purse is None:
            purse = _Purse(self._burst_units, now_s)
            if len(self._purses) >= self._max_connections:
                del self._purses[next(iter(self._purses))]
        self._purses[connection] = purse
        earned = (now_s - purse.filled_s) * self._units_per_s
        purse.units = min(purse.units + earned, self._burst_units)
        purse.filled_s = now_s
        if purse.units < 0:
            return False
        purse.units -= 1 + num_bytes / UNIT_BYTES
        return True

    def charge_answer(self, connection: bytes) -> None:
        """A message has caused an answer: short ones can ask for many."""
        purse = self._purses.get(connection)
        if purse is not None:
            purse.units -= 1
