"""P's worker: sends prompts to D's while they are computed.

The main thread brings steps and marks layers; the control thread brings reservations; one thread
per D rank waits for the ends of its transfers. The copying itself is the engine's. Nothing here
waits for a peer while it holds the lock, so no D can delay a forward.

A D rank is told ``Done`` when everything it reserved has arrived and the production was valid all
the time: ``Done`` and the void of a production are decided under one lock, and the void is applied
before vLLM may overwrite a block.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Cancel,
    Done,
    Failed,
    Reserve,
    Void,
)
from vllm_llmdd_connector.errors import RemoteProtocolError, TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.scheduler.block_map import NULL_BLOCK
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Trace
from vllm_llmdd_connector.worker.layer_events import LayerEvents
from vllm_llmdd_connector.worker.push_plan import Order, PushPlan, Reply, Reservation

logger = get_logger(__name__)

MAX_STARTED = 16
"""Transfers under way to one D rank; each has a thread in the engine. Others wait as plans."""
IDLE_S = 30.0
"""A D rank's thread ends after this long without work."""
_WITHDRAWN = "LLM_KV_CACHE_NOT_EXIST"
_NEVER_ENDED = "the forward that computes it did not end"


class Task(Protocol):
    """A transfer under way."""

    def wait(self) -> str: ...
    def layer_times(self) -> list[tuple[int, int, int]]: ...


class PushEngine(Protocol):
    """What a ``Pusher`` needs of the engine; ``DataDistEngine`` has it."""

    cluster_id: int

    def new_synchronizer(self, num_layers: int) -> Any: ...
    def start_push(
        self,
        plan: CachePlan,
        synchronizer: Any,
        peer_cluster_id: int,
        token: int,
        src_blocks: list[int],
        dst_positions: list[int],
    ) -> Task: ...


@dataclass(slots=True)
class _Piece:
    """One order's share in one cache."""

    order: Order
    plan: CachePlan
    token: int
    task: Task | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.order.src_blocks) * self.plan.block_len * len(self.plan.regions)


class Pusher:
    """All pushes of one P worker."""

    def __init__(
        self,
        engine: PushEngine,
        plans: Sequence[CachePlan],
        block_sizes: Sequence[int],
        clock: Callable[[], float],
        stats: TransferStats,
        trace: Trace = NO_TRACE,
    ) -> None:
        self._trace = trace
        self._engine = engine
        self._plans = list(plans)
        self._clock = clock
        self._stats = stats
        self._lock = threading.Lock()
        self._events = LayerEvents(plans, engine.new_synchronizer)
        self._plan = PushPlan(block_sizes)
        self._senders: dict[int, _Sender] = {}
        self._is_closed = False
        # Called for each layer of a forward, so without a frame of its own.
        self.layer_computed = self._events.computed

    @property
    def num_under_way(self) -> int:
        """Transfers that are started or wait to be."""
        with self._lock:
            return sum(len(sender) for sender in self._senders.values())

    # Main thread

    def void(self, productions: Sequence[int]) -> None:
        """These productions' blocks are about to be overwritten."""
        with self._lock:
            for production in productions:
                for reservation in self._plan.void(production):
                    message = reservation.message
                    reservation.reply(
                        Void(transfer_id=message.transfer_id, reservation=message.reservation)
                    )

    def begin_step(self, chunks: Sequence[PrefillChunk]) -> None:
        """A forward is about to compute these parts of prompts."""
        with self._lock:
            if self._events.is_running:
                # The last forward did not reach its end: what it should have computed is unknown.
                for reservation in self._plan.void_step(self._events.generation):
                    self._tell_failed(reservation, _NEVER_ENDED)
            self._events.begin()
            for chunk in chunks:
                for order in self._plan.advance(chunk, self._events.generation):
                    self._begin(order)

    def end_step(self) -> None:
        """The forward has ended."""
        if self._events.is_running:
            with self._lock:
                self._events.end()

    def close(self) -> None:
        """Start nothing more; the engine's end ends what is under way."""
        with self._lock:
            self._is_closed = True
            senders = list(self._senders.values())
        for sender in senders:
            sender.stop()

    # Control thread

    def handle(self, message: AnyMessage, reply: Reply) -> None:
        """One message of a D worker."""
        match message:
            case Reserve(to_cluster=cluster) | Cancel(to_cluster=cluster):
                if cluster != self._engine.cluster_id:
                    raise RemoteProtocolError(f"{type(message).__name__} for cluster {cluster:x}")
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a prefill worker")
        with self._lock:
            if isinstance(message, Cancel):
                self._plan.cancel(message.transfer_id, message.reservation)
                return
            problem = self._problem_of(message)
            if problem:
                raise RemoteProtocolError(problem)
            if self._plan.is_lost(message.transfer_id):
                reply(_failed(message, _NEVER_ENDED))
                return
            for order in self._plan.reserve(message, reply, self._clock()):
                self._begin(order)

    def _problem_of(self, message: Reserve) -> str:
        known = {token.model_id for token in message.tokens}
        for plan in self._plans:
            if plan.group_index >= len(message.spans):
                return f"Reserve names {len(message.spans)} KV cache groups"
            if message.spans[plan.group_index].count and plan.model_id not in known:
                return f"Reserve has no token for cache {plan.model_id}"
        return ""

    # With the lock

    def _begin(self, order: Order) -> None:
        message = order.reservation.message
        if NULL_BLOCK in order.src_blocks:
            # vLLM keeps what D's window still reads; should it not, silence would be wrong KV.
            self._tell_failed(order.reservation, "P has dropped a block that is wanted")
            return
        tokens = {token.model_id: token.token for token in message.tokens}
        pieces = [
            _Piece(order, plan, tokens[plan.model_id])
            for plan in self._plans
            if plan.group_index == order.group_index
        ]
        order.num_left = len(pieces)
        sender = self._senders.get(message.cluster_id)
        if sender is None:
            sender = self._senders[message.cluster_id] = _Sender(message.cluster_id, self)
        for piece in pieces:
            if self._trace is not NO_TRACE:
                self._trace.event("queued", **_named(piece))
            sender.add(piece)

    def start(self, piece: _Piece) -> bool:
        """Start a transfer; False when it is not wanted any more. With the lock."""
        order = piece.order
        reservation = order.reservation
        if reservation.is_over or self._is_closed:
            return False
        synchronizer = self._events.synchronizer(piece.plan.model_id, order.generation)
        try:
            piece.task = self._engine.start_push(
                piece.plan,
                synchronizer,
                reservation.message.cluster_id,
                piece.token,
                order.src_blocks,
                order.dst_positions,
            )
        except TransferError as error:
            self._tell_failed(reservation, str(error))
            return False
        return True

    def _tell_failed(self, reservation: Reservation, reason: str) -> None:
        if reservation.is_over:
            return
        reservation.is_over = True
        message = reservation.message
        self._stats.count_failure("push")
        logger.error(
            "transfer %s: push to cluster %x failed: %s",
            message.transfer_id,
            message.cluster_id,
            reason,
        )
        reservation.reply(_failed(message, reason))

    # A sender's thread

    def ended(self, piece: _Piece, status: str) -> None:
        """A transfer has ended."""
        order = piece.order
        reservation = order.reservation
        with self._lock:
            if status == _WITHDRAWN:
                # D has closed the reservation; its Cancel may still be on the way.
                self._plan.cancel(reservation.message.transfer_id, reservation.message.reservation)
                return
            if status != "LLM_SUCCESS":
                self._tell_failed(reservation, f"transfer_cache_async ended with {status}")
                return
            reservation.num_bytes += piece.num_bytes
            order.num_left -= 1
            if not order.num_left:
                reservation.num_open -= 1
            self._stats.count("sent_transfers")
            if not self._plan.is_done(reservation):
                return
            reservation.is_over = True
            message = reservation.message
            self._trace.event("done", **_names_of(reservation))
            reservation.reply(
                Done(
                    transfer_id=message.transfer_id,
                    reservation=message.reservation,
                    production=reservation.production,
                )
            )
        self._stats.count("sent_requests")
        self._stats.count("sent_bytes", reservation.num_bytes)
        self._stats.observe("push_seconds", self._clock() - reservation.opened_s)

    def record(self, piece: _Piece) -> None:
        """A transfer has ended; after ``ended``, so that D does not wait for it."""
        if self._trace is NO_TRACE or piece.task is None:
            return
        names = _named(piece)
        for layer, started_ns, acknowledged_ns in piece.task.layer_times():
            self._trace.span("sent", started_ns, acknowledged_ns, **names, layer=layer)

    def lock_for_next(self) -> threading.Lock:
        """Guards a sender's queues."""
        return self._lock

    def gone(self, cluster_id: int) -> None:
        """A sender's thread is about to end; with the lock."""
        del self._senders[cluster_id]


def _failed(message: Reserve, reason: str) -> Failed:
    return Failed(transfer_id=message.transfer_id, reservation=message.reservation, reason=reason)


def _end_of(piece: _Piece) -> str:
    """Wait for a transfer's end. What nobody foresaw fails it, and not the thread for all."""
    assert piece.task is not None
    try:
        return piece.task.wait()
    except Exception:
        logger.exception("a push to cluster %x", piece.order.reservation.message.cluster_id)
        return "an internal error"


def _names_of(reservation: Reservation) -> dict[str, Any]:
    message = reservation.message
    return {
        "transfer": message.transfer_id,
        # Hexadecimal: many readers of JSON turn integers of this size into floats.
        "reservation": f"{message.reservation:x}",
        "production": reservation.production,
    }


def _named(piece: _Piece) -> dict[str, Any]:
    """What a trace says of a piece; ``layer_bytes`` are those of each of its layers."""
    return {
        **_names_of(piece.order.reservation),
        "cache": piece.plan.model_id,
        "layer_bytes": len(piece.order.src_blocks) * piece.plan.block_len,
    }


class _Sender:
    """The transfers to one D rank: a bounded number under way, ends awaited in order."""

    def __init__(self, cluster_id: int, pusher: Pusher) -> None:
        self._cluster_id = cluster_id
        self._pusher = pusher
        self._waiting: deque[_Piece] = deque()
        self._started: deque[_Piece] = deque()
        self._changed = threading.Condition(pusher.lock_for_next())
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, name=f"llmdd-push-{cluster_id:x}", daemon=True
        )
        self._thread.start()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    def add(self, piece: _Piece) -> None:
        """Start it now or when others have ended; with the lock."""
        self._waiting.append(piece)
        self._start_some()
        self._changed.notify()

    def stop(self) -> None:
        """End the thread once the engine has ended what is under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _start_some(self) -> None:
        while self._waiting and len(self._started) < MAX_STARTED:
            piece = self._waiting.popleft()
            if self._pusher.start(piece):
                self._started.append(piece)

    def _run(self) -> None:
        while True:
            piece = self._next()
            if piece is None:
                return
            self._pusher.ended(piece, _end_of(piece))
            self._pusher.record(piece)
            with self._changed:
                self._started.popleft()
                self._start_some()

    def _next(self) -> _Piece | None:
        """The oldest transfer under way; None when the thread is to end."""
        with self._changed:
            while not self._started:
                if self._stopping or not self._changed.wait(IDLE_S):
                    if self._started:
                        continue
                    self._pusher.gone(self._cluster_id)
                    return None
            return self._started[0]
