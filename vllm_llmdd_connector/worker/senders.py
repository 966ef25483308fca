"""P's worker on an engine with reservations: the engine sends, one thread per D rank waits.

The engine's transfers wait for their layers without Python, and those to several D ranks run side
by side. D's engine keeps what comes too late away from its blocks, so nobody waits for it here.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_llmdd_connector.deadlines import IDLE_S
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.worker.layer_events import LayerEvents
from vllm_llmdd_connector.worker.push_piece import Ledger, Piece
from vllm_llmdd_connector.worker.push_plan import Order, Reservation

logger = get_logger(__name__)

MAX_STARTED = 16
"""Transfers under way to one D rank; each has a thread in the engine. Others wait as plans."""


class Task(Protocol):
    """A transfer under way."""

    def wait(self) -> str: ...
    def layer_times(self) -> list[tuple[int, int, int]]: ...


class SendEngine(Protocol):
    """What ``Senders`` need of the engine; ``DataDistEngine`` has it."""

    def start_push(
        self,
        plan: CachePlan,
        synchronizer: Any,
        peer_cluster_id: int,
        token: int,
        src_blocks: list[int],
        dst_positions: list[int],
    ) -> Task: ...


@dataclass(slots=True, eq=False)
class SentPiece(Piece):
    """A piece for D's reservation of ``token``."""

    token: int = 0
    task: Task | None = None

    def layer_times(self) -> list[tuple[int, int, int]]:
        return [] if self.task is None else self.task.layer_times()


class Senders:
    """The transfers to all D ranks; called with ``lock``, the ledger's."""

    def __init__(
        self, engine: SendEngine, events: LayerEvents, ledger: Ledger, lock: threading.RLock
    ) -> None:
        self._engine = engine
        self._events = events
        self._ledger = ledger
        self._lock = lock
        self.by_cluster: dict[int, _Sender] = {}

    def __len__(self) -> int:
        return sum(len(sender) for sender in self.by_cluster.values())

    def make(self, order: Order, plan: CachePlan) -> SentPiece:
        """The order's share in a cache."""
        tokens = {token.model_id: token.token for token in order.reservation.message.tokens}
        return SentPiece(order, plan, tokens[plan.model_id])

    def add(self, piece: SentPiece) -> None:
        """Send it as soon as its layers are computed, and others to this D rank have ended."""
        sender = self.by_cluster.get(piece.cluster_id)
        if sender is None:
            try:
                sender = _Sender(piece.cluster_id, self, self._ledger, self._lock)
            except RuntimeError as error:
                self._ledger.fail(piece.order.reservation, f"no thread to send with: {error}")
                return
            self.by_cluster[piece.cluster_id] = sender
        sender.add(piece)

    def when_quiet(self, is_meant: Callable[[Reservation], bool], tell: Callable[[], None]) -> None:
        """At once: D has closed what it does not want."""
        tell()

    def given_up(self) -> None:
        """Transfers that are not wanted end by themselves."""

    def step_ended(self) -> None:
        """The engine has been told by the synchronizers."""

    def stop(self) -> None:
        """End the threads once the engine has ended what is under way."""
        for sender in self.by_cluster.values():
            sender.stop()

    def join(self) -> None:
        """Nothing to wait for: the engine's end ends the transfers."""

    def start(self, piece: SentPiece) -> bool:
        """Start a transfer; False when it is not wanted any more."""
        order = piece.order
        if order.reservation.is_over or self._ledger.is_closed:
            return False
        synchronizer = self._events.synchronizer(piece.plan.model_id, order.generation)
        try:
            piece.task = self._engine.start_push(
                piece.plan,
                synchronizer,
                piece.cluster_id,
                piece.token,
                order.src_blocks,
                order.dst_positions,
            )
        except TransferError as error:
            self._ledger.fail(order.reservation, str(error))
            return False
        return True

    def gone(self, cluster_id: int) -> None:
        """A sender's thread is about to end."""
        del self.by_cluster[cluster_id]


class _Sender:
    """The transfers to one D rank: a bounded number under way, ends awaited in order."""

    def __init__(
        self, cluster_id: int, senders: Senders, ledger: Ledger, lock: threading.RLock
    ) -> None:
        self._cluster_id = cluster_id
        self._senders = senders
        self._ledger = ledger
        self._waiting: deque[SentPiece] = deque()
        self._started: deque[SentPiece] = deque()
        self._changed = threading.Condition(lock)
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"llmdd-push-{cluster_id:x}", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    def add(self, piece: SentPiece) -> None:
        self._waiting.append(piece)
        self._start_some()
        self._changed.notify()

    def stop(self) -> None:
        self._stopping = True
        self._changed.notify()

    def _start_some(self) -> None:
        while self._waiting and len(self._started) < MAX_STARTED:
            piece = self._waiting.popleft()
            if self._senders.start(piece):
                self._started.append(piece)

    def _run(self) -> None:
        while True:
            piece = self._next()
            if piece is None:
                return
            self._ledger.ended(piece, _end_of(piece))
            self._ledger.record(piece)
            with self._changed:
                self._started.popleft()
                self._start_some()

    def _next(self) -> SentPiece | None:
        """The oldest transfer under way; None when the thread is to end."""
        with self._changed:
            while not self._started:
                if self._stopping or not self._changed.wait(IDLE_S):
                    if self._started:
                        continue
                    self._senders.gone(self._cluster_id)
                    return None
            return self._started[0]


def _end_of(piece: SentPiece) -> str:
    """Wait for a transfer's end. What nobody foresaw fails it, and not the thread for all."""
    assert piece.task is not None
    try:
        return piece.task.wait()
    except Exception:
        logger.exception("push to cluster %x: internal error", piece.cluster_id)
        return "an internal error"
