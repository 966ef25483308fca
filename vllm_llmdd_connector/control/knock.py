"""P's messages to D's that have asked a metaserver: where the prompt is computed.

One thread, started with the first knock, keeps a connection to each such D for a while; D answers
on a connection of its own. A D that cannot be reached is reported, so that P holds nothing for it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_llmdd_connector.control.channel import Dialer, Sleeper, new_context
from vllm_llmdd_connector.control.keys import KeySet
from vllm_llmdd_connector.control.messages import Knock
from vllm_llmdd_connector.deadlines import IDLE_S
from vllm_llmdd_connector.errors import LinkError
from vllm_llmdd_connector.log import get_logger

logger = get_logger(__name__)

MAX_REMEMBERED = 1024
"""Knocks on one connection whose failure can still be reported; D answers in milliseconds."""

OnFailed = Callable[[], None]
Address = tuple[str, int]


@dataclass(slots=True)
class _Door:
    dialer: Dialer
    used_s: float
    knocks: deque[OnFailed] = field(default_factory=lambda: deque(maxlen=MAX_REMEMBERED))


class Knocker:
    """Connections to D's by address."""

    def __init__(self, keys: KeySet | None = None) -> None:
        self._keys = keys
        self._commands: deque[tuple[Address, Knock, OnFailed]] = deque()
        self._doors: dict[Address, _Door] = {}
        self._sleeper = Sleeper()
        self._stopping = False
        self._context = new_context()
        self._thread: threading.Thread | None = None

    def knock(self, address: Address, message: Knock, on_failed: OnFailed) -> None:
        """Send ``message``; ``on_failed`` is called, on another thread, when D is not there.

        It may be called after D has had the message, when D's process ends, and before this
        returns, when no thread is to be had.
        """
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="llmdd-knock", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                _log_untold(message, error)
                on_failed()
                return
            self._thread = thread
        self._commands.append((address, message, on_failed))
        self._sleeper.wake()

    def close(self) -> None:
        """Stop the thread and close all connections; idempotent."""
        if self._stopping:
            return
        self._stopping = True
        if self._thread is not None:
            self._sleeper.wake()
            self._thread.join()
        for door in self._doors.values():
            door.dialer.close()
        self._context.term()
        self._sleeper.close()

    def _run(self) -> None:
        while not self._stopping:
            self._sleeper.sleep(int(IDLE_S * 1000) if self._doors else None)
            self._drop_lost()
            while self._commands:
                self._send(*self._commands.popleft())
            self._drop_idle()

    def _send(self, address: Address, message: Knock, on_failed: OnFailed) -> None:
        try:
            door = self._doors.get(address) or self._open(address)
        except LinkError as error:
            _log_untold(message, error)
            on_failed()
            return
        door.used_s = time.monotonic()
        door.knocks.append(on_failed)
        door.dialer.send([message])

    def _open(self, address: Address) -> _Door:
        door = _Door(Dialer(self._context, *address, self._keys), time.monotonic())
        self._sleeper.watch(door.dialer.monitor)
        self._doors[address] = door
        return door

    def _drop_lost(self) -> None:
        for address, door in list(self._doors.items()):
            if not door.dialer.was_lost():
                continue
            logger.warning(
                "decode server %s:%d is not there to be told of its %d last prefills: %s",
                *address,
                len(door.knocks),
                door.dialer.loss,
            )
            self._close(address)
            for on_failed in door.knocks:
                on_failed()

    def _drop_idle(self) -> None:
        now_s = time.monotonic()
        for address, door in list(self._doors.items()):
            if now_s - door.used_s >= IDLE_S:
                self._close(address)

    def _close(self, address: Address) -> None:
        dialer = self._doors.pop(address).dialer
        self._sleeper.ignore(dialer.monitor)
        dialer.close()


def _log_untold(message: Knock, error: Exception) -> None:
    logger.warning("transfer %s: its decode server is not told: %s", message.transfer_id, error)
