"""The control connections of a pair, on which one kind of message meets a fault.

Messages are stopped where they arrive, in the receiver's own thread: sockets are used by one thread
only. What was held is handed over when the receiver next looks, for which it is woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_llmdd_connector.control import session
from vllm_llmdd_connector.control.channel import Dialer, Server, Sleeper
from vllm_llmdd_connector.control.messages import AnyMessage, decode, encode
from vllm_llmdd_connector.worker import peer, pull, releases, reports

RESEND_S = 0.05

_LEAP_S = 1000.0


class LeapClock:
    """D's time: as real as any, until it leaps over every limit that is running."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead_s

    def leap(self) -> None:
        self._ahead_s += _LEAP_S


Fault = Callable[["Wire", AnyMessage], list[AnyMessage]]
"""What the receiver gets in place of a message of the kind."""


class Wire:
    """All control messages of all engines; those of ``kind`` go through ``fault``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kind: type[Any] = type(None)
        self.fault: Fault = lambda wire, message: [message]
        self.seen = threading.Event()
        """Set by the first message of the kind."""
        self.num_seen = 0
        self.is_cut = False
        """From now on nothing arrives."""
        self.lets_overtake = False
        """What is held arrives behind the next message to the same receiver."""
        self.d_clock = LeapClock()
        """Of D's scheduler, to be given to it, and of its peers' threads."""
        self._held: dict[int, list[AnyMessage]] = {}
        self._to_hold: list[AnyMessage] = []
        self._servers: dict[int, Callable[[AnyMessage], None]] = {}
        """How a server gets a message, by receiver."""
        self._sleepers: dict[int, Sleeper] = {}
        self._lock = threading.Lock()
        self._install(monkeypatch)
        d_time = SimpleNamespace(monotonic=self.d_clock, monotonic_ns=time.monotonic_ns)
        for module in (peer, pull, reports):
            monkeypatch.setattr(module, "time", d_time)
        for module in (session, pull, releases):
            monkeypatch.setattr(module, "RESEND_S", RESEND_S)

    def let(self, kind: type[Any], fault: Fault) -> None:
        """Messages of this kind meet this fault from now on."""
        self.kind, self.fault = kind, fault

    def hold(self, message: AnyMessage) -> list[AnyMessage]:
        """For a fault: the message waits for ``heal`` or for one that overtakes it."""
        self._to_hold.append(message)
        return []

    def heal(self) -> None:
        """Nothing is stopped any more; what was held arrives."""
        with self._lock:
            self.kind, self.is_cut = type(None), False
            to_servers = {number: self._held.pop(number, []) for number in self._servers}
        for number, messages in to_servers.items():
            for message in messages:
                self._servers[number](message)
        self._wake()

    def end_waits(self) -> None:
        """All of D's limits that are running are over."""
        self.d_clock.leap()
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            for sleeper in self._sleepers.values():
                sleeper.wake()

    def _arrived(self, receiver: int, message: AnyMessage) -> list[AnyMessage]:
        """What the receiver gets now."""
        with self._lock:
            if self.is_cut:
                return []
            held = self._held.pop(receiver, []) if self.lets_overtake else []
            if not isinstance(message, self.kind):
                return [message, *held]
            self.num_seen += 1
            passed = self.fault(self, message)
            if self._to_hold:
                self._held.setdefault(receiver, []).extend(self._to_hold)
                self._to_hold = []
            self.seen.set()
            return [*passed, *held]

    def _released(self, receiver: int) -> list[AnyMessage]:
        """What was held and may arrive."""
        with self._lock:
            return self._held.pop(receiver, []) if self.kind is type(None) else []

    def _install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        handle, receive, watch = Server._handle, Dialer.receive, Sleeper.watch

        def server_handle(server: Server, identity: bytes, frame: bytes) -> None:
            def deliver(message: AnyMessage) -> None:
                handle(server, identity, encode(message))

            number = hash((id(server), identity))
            self._servers.setdefault(number, deliver)
            for message in self._arrived(number, decode(frame)):
                deliver(message)

        def dialer_receive(dialer: Dialer) -> tuple[list[AnyMessage], int]:
            messages, num_junk = receive(dialer)
            passed = [m for message in messages for m in self._arrived(id(dialer), message)]
            return [*passed, *self._released(id(dialer))], num_junk

        def sleeper_watch(sleeper: Sleeper, *sockets: Any) -> None:
            with self._lock:
                self._sleepers[id(sleeper)] = sleeper
            watch(sleeper, *sockets)

        def sleeper_close(sleeper: Sleeper) -> None:
            with self._lock:
                self._sleepers.pop(id(sleeper), None)
                close(sleeper)

        close = Sleeper.close
        monkeypatch.setattr(Server, "_handle", server_handle)
        monkeypatch.setattr(Dialer, "receive", dialer_receive)
        monkeypatch.setattr(Sleeper, "watch", sleeper_watch)
        monkeypatch.setattr(Sleeper, "close", sleeper_close)


def lost(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    return []


def lost_once(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    return [] if wire.num_seen == 1 else [message]


def doubled(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    return [message, message]


def overtaken(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    """The first comes behind whatever its receiver gets next."""
    wire.lets_overtake = True
    return wire.hold(message) if wire.num_seen == 1 else [message]


def late(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    """It and all that repeat it arrive when the request is over."""
    return wire.hold(message)


def cut(wire: Wire, message: AnyMessage) -> list[AnyMessage]:
    """The sender or the receiver stands still from here on."""
    wire.is_cut = True
    return []
