"""P's worker: sends prompts to D's while they are computed.

The main thread brings steps and marks layers; the control thread brings reservations; a carrier has
threads that send. With an engine that knows reservations these are ``Senders``, else a
``Dispatcher``. Nothing here waits for a peer while it holds the lock, so no D can delay a forward.

A D rank is told ``Done`` when everything it reserved has arrived and the production was valid all
the time: ``Done`` and the void of a production are decided under one lock, and the void is applied
before vLLM may overwrite a block.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Cancel,
    CancelAck,
    CancelAll,
    Done,
    Failed,
    Message,
    Reserve,
    Void,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Trace
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.dispatch import Dispatcher, WriteEngine
from vllm_llmdd_connector.worker.layer_events import LayerEvents
from vllm_llmdd_connector.worker.push_piece import Piece, named, names_of
from vllm_llmdd_connector.worker.push_plan import Order, PushPlan, Reply, Reservation
from vllm_llmdd_connector.worker.push_sums import PushSums
from vllm_llmdd_connector.worker.senders import SendEngine, Senders
from vllm_llmdd_connector.worker.step_fences import Fences

logger = get_logger(__name__)

MAX_LINK_NUMBERS = 4096
"""D ranks whose last link is remembered; one beyond pushes out the oldest."""
_LINK_LOST = ("LLM_TIMEOUT", "LLM_FAILED", "LLM_NOT_YET_LINK")
"""Ends of a transfer after which the host engine's link carries nothing more, with more words."""
_WITHDRAWN = "LLM_KV_CACHE_NOT_EXIST"
_NEVER_ENDED = "the forward that computes it did not end"


class PushEngine(SendEngine, WriteEngine, Protocol):
    """What a ``Pusher`` needs of the engine; ``DataDistEngine`` has it."""

    cluster_id: int

    @property
    def has_reservations(self) -> bool: ...
    def new_synchronizer(self, num_layers: int) -> Any: ...
    def record_fence(self) -> Fence | None: ...


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
        sums: PushSums | None = None,
    ) -> None:
        """With ``sums`` D is told checksums of what it is sent."""
        self._trace = trace
        self._sums = sums
        self._engine = engine
        self._plans = list(plans)
        self._clock = clock
        self._stats = stats
        self._lock = threading.RLock()
        self._plan = PushPlan(block_sizes)
        self._link_numbers: dict[int, int] = {}
        """Per D rank: reservations for earlier links say nothing."""
        self.is_closed = False
        self._carrier: Senders | Dispatcher
        if engine.has_reservations:
            self._events = LayerEvents(plans, engine.new_synchronizer)
            self._carrier = Senders(engine, self._events, self, self._lock)
        else:
            changed = threading.Condition(self._lock)
            fences = Fences(engine.record_fence, changed)
            self._events = LayerEvents(plans, fences.new_marks, fences.around)
            self._carrier = Dispatcher(engine, self._events, fences, self, changed)
        # Called for each layer of a forward, so without a frame of its own.
        self.layer_computed = self._events.computed
        if sums is not None:
            self.layer_computed = self._computed_and_summed

    @property
    def num_under_way(self) -> int:
        """Transfers that are started or wait to be."""
        with self._lock:
            return len(self._carrier)

    # Main thread

    def void(self, productions: Sequence[int]) -> None:
        """These productions' blocks are about to be overwritten."""
        with self._lock:
            for production in productions:
                for reservation in self._plan.void(production):
                    message = reservation.message
                    void = Void(transfer_id=message.transfer_id, reservation=message.reservation)
                    self._end(reservation, void)

    def begin_step(self, chunks: Sequence[PrefillChunk]) -> None:
        """A forward is about to compute these parts of prompts."""
        with self._lock:
            if self._events.is_running:
                # The last forward did not reach its end: what it should have computed is unknown.
                for reservation in self._plan.void_step(self._events.generation):
                    self.fail(reservation, _NEVER_ENDED)
            self._events.begin()
            if self._sums is not None:
                self._sums.events.begin()
            for chunk in chunks:
                for order in self._plan.advance(chunk, self._events.generation):
                    self._begin(order)

    def end_step(self) -> None:
        """The forward has ended."""
        if self._events.is_running:
            with self._lock:
                self._events.end()
                self._carrier.step_ended()
                if self._sums is not None:
                    self._sums.events.end()

    def _computed_and_summed(self, layer_name: str) -> None:
        """``layer_computed`` with checksums."""
        assert self._sums is not None
        self._events.computed(layer_name)
        self._sums.events.computed(layer_name)

    def close(self) -> None:
        """Start nothing more. Afterwards the engine may be closed, which ends what is under way."""
        with self._lock:
            self.is_closed = True
            self._carrier.stop()
        self._carrier.join()

    # Control thread

    def handle(self, message: AnyMessage, reply: Reply) -> None:
        """One message of a D worker."""
        match message:
            case CancelAll(to_cluster=cluster) if cluster != self._engine.cluster_id:
                # Another process has had this address, and is gone.
                reply(CancelAck())
                return
            case CancelAll():
                pass
            case Reserve(to_cluster=cluster) | Cancel(to_cluster=cluster):
                if cluster != self._engine.cluster_id:
                    raise RemoteProtocolError(f"{type(message).__name__} for cluster {cluster:x}")
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a prefill worker")
        with self._lock:
            match message:
                case Reserve():
                    self._reserve(message, reply)
                case Cancel():
                    self._cancel(message, reply)
                case CancelAll():
                    self._cancel_all(message, reply)

    # With the lock

    def _reserve(self, message: Reserve, reply: Reply) -> None:
        problem = self._problem_of(message)
        if problem:
            raise RemoteProtocolError(problem)
        if message.link_number < self._link_numbers.get(message.cluster_id, 0):
            # D has closed the connection on which it came, and uses the blocks for others.
            return
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
            count = message.spans[plan.group_index].count
            if self._engine.has_reservations and count and plan.model_id not in known:
                return f"Reserve has no token for cache {plan.model_id}"
            blocks = _blocks_of(message, plan.group_index)
            if not self._engine.has_reservations and (len(blocks) != count or NULL_BLOCK in blocks):
                return f"Reserve does not name {count} blocks of KV cache group {plan.group_index}"
        return ""

    def _cancel(self, message: Cancel, reply: Reply) -> None:
        self._plan.cancel(message.transfer_id, message.reservation)
        ack = CancelAck(transfer_id=message.transfer_id, reservation=message.reservation)
        self._carrier.given_up()
        self._carrier.when_quiet(
            lambda reservation: reservation.message.reservation == message.reservation,
            lambda: reply(ack),
        )

    def _cancel_all(self, message: CancelAll, reply: Reply) -> None:
        def is_earlier(reservation: Reservation) -> bool:
            other = reservation.message
            return (
                other.cluster_id == message.cluster_id and other.link_number < message.link_number
            )

        number = max(message.link_number, self._link_numbers.pop(message.cluster_id, 0))
        self._link_numbers[message.cluster_id] = number
        if len(self._link_numbers) > MAX_LINK_NUMBERS:
            del self._link_numbers[next(iter(self._link_numbers))]
        for reservation in self._plan.lose(is_earlier):
            reservation.is_over = True
        self._carrier.given_up()
        self._carrier.when_quiet(is_earlier, lambda: reply(CancelAck()))

    def _begin(self, order: Order) -> None:
        if NULL_BLOCK in order.src_blocks:
            # vLLM keeps what D's window still reads; should it not, silence would be wrong KV.
            self.fail(order.reservation, "P has dropped a block that is wanted")
            return
        pieces: list[Any] = [
            self._carrier.make(order, plan)
            for plan in self._plans
            if plan.group_index == order.group_index
        ]
        order.num_left = len(pieces)
        if self._sums is not None:
            order.num_left += self._sums.start(order, lambda: self._summed(order))
        for piece in pieces:
            if self._trace is not NO_TRACE:
                self._trace.event("queued", **named(piece))
            self._carrier.add(piece)

    def fail(self, reservation: Reservation, reason: str, link_lost: bool = False) -> None:
        """Nothing more is sent for it, and D is told so."""
        if reservation.is_over:
            return
        message = reservation.message
        self._stats.count_failure("push")
        logger.error(
            "transfer %s: push to cluster %x failed: %s",
            message.transfer_id,
            message.cluster_id,
            reason,
        )
        self._end(reservation, _failed(message, reason, link_lost))

    def lose_link(self, reservation: Reservation, reason: str) -> None:
        """A call for it has failed: nothing more goes over the link to its D rank."""
        message = reservation.message
        if reservation.is_over:
            # D waits for another word of it, which does not say that its end is to be dropped, too.
            logger.warning("link to cluster %x dropped: %s", message.cluster_id, reason)
            reservation.reply(_failed(message, reason, link_lost=True))
        for lost in self._plan.lose(lambda r: r.message.cluster_id == message.cluster_id):
            self.fail(lost, reason, link_lost=True)

    def _end(self, reservation: Reservation, last_word: Message) -> None:
        reservation.is_over = True
        self._carrier.given_up()
        self._carrier.when_quiet(
            lambda other: other is reservation, lambda: reservation.reply(last_word)
        )

    def _part_ended(self, order: Order) -> None:
        """One transfer of an order, or the checksums of one cache, are there."""
        reservation = order.reservation
        order.num_left -= 1
        if not order.num_left:
            reservation.num_open -= 1
        if not self._plan.is_done(reservation):
            return
        reservation.is_over = True
        message = reservation.message
        self._trace.event("done", **names_of(reservation))
        reservation.reply(
            Done(
                transfer_id=message.transfer_id,
                reservation=message.reservation,
                production=reservation.production,
                sums=() if self._sums is None else self._sums.result(reservation),
            )
        )
        self._stats.count("sent_requests")
        self._stats.count("sent_bytes", reservation.num_bytes)
        self._stats.observe("push_seconds", self._clock() - reservation.opened_s)

    # The sum thread

    def _summed(self, order: Order) -> None:
        with self._lock:
            self._part_ended(order)

    # A carrier's thread

    def ended(self, piece: Piece, status: str) -> None:
        """A transfer has ended."""
        order = piece.order
        reservation = order.reservation
        with self._lock:
            if status == _WITHDRAWN:
                # D has closed the reservation; its Cancel may still be on the way.
                self._plan.cancel(reservation.message.transfer_id, reservation.message.reservation)
                return
            if status != "LLM_SUCCESS":
                reason = f"transfer_cache_async ended with {status}"
                self.fail(reservation, reason, link_lost=status.startswith(_LINK_LOST))
                return
            reservation.num_bytes += piece.num_bytes
            self._stats.count("sent_transfers")
            self._part_ended(order)

    def record(self, piece: Piece) -> None:
        """A transfer has ended; after ``ended``, so that D does not wait for it."""
        if self._trace is NO_TRACE:
            return
        names = named(piece)
        for layer, started_ns, acknowledged_ns in piece.layer_times():
            self._trace.span("sent", started_ns, acknowledged_ns, **names, layer=layer)


def _failed(message: Reserve, reason: str, link_lost: bool = False) -> Failed:
    return Failed(
        transfer_id=message.transfer_id,
        reservation=message.reservation,
        reason=reason,
        link_lost=link_lost,
    )


def _blocks_of(message: Reserve, group_index: int) -> tuple[int, ...]:
    return message.blocks[group_index] if group_index < len(message.blocks) else ()
