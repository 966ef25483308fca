"""P's worker on an engine without reservations: one thread writes to all D ranks, call by call.

The vendor's package takes one layer-wise transfer at a time in a process, so one thread orders
everything. A lone piece goes as one ``transfer_cache_async``. As soon as there are others, pieces
go layer by layer, each D rank in its turn, so that none waits for another's last layer; a transfer
that runs by then ends at its next layer, and the rest of it takes its turns with the others.

The engine writes D's blocks directly. So what D is told of a reservation that is over waits for the
call which writes it at the moment: see ``when_quiet``. A call lasts as long as the engine's timeout
at most; a dead D rank costs the others one such time, because the first failure ends everything for
it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from vllm_llmdd_connector.deadlines import MAX_TEARDOWN_S
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.worker.layer_events import LayerEvents
from vllm_llmdd_connector.worker.push_piece import Ledger, Piece
from vllm_llmdd_connector.worker.push_plan import Order, Reservation
from vllm_llmdd_connector.worker.step_fences import Fences, StepFences

logger = get_logger(__name__)


class WriteEngine(Protocol):
    """What a ``Dispatcher`` needs of the engine; ``DataDistEngine`` has it."""

    def push_layer(
        self,
        plan: CachePlan,
        layer: int,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
    ) -> None: ...
    def can_push_layers(self, plan: CachePlan, num_blocks: int) -> bool: ...
    def push_layers(
        self,
        plan: CachePlan,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
        wait_for_layer: Callable[[int], bool],
    ) -> int: ...
    def drop_link(self, peer_cluster_id: int) -> None: ...


@dataclass(slots=True, eq=False)
class WrittenPiece(Piece):
    """A piece for blocks that D has named."""

    dst_blocks: list[int]
    step: StepFences
    next_layer: int = 0
    """Those before it have arrived."""
    times: list[tuple[int, int, int]] = field(default_factory=list)

    def layer_times(self) -> list[tuple[int, int, int]]:
        return self.times

    def regions(self, layer: int) -> range:
        per_layer = self.plan.tensors_per_layer
        return range(layer * per_layer, (layer + 1) * per_layer)

    def arrived(self, layer: int, started_ns: int) -> None:
        """A layer is in D's blocks."""
        self.next_layer = layer + 1
        now_ns = time.monotonic_ns()
        self.times.extend((region, started_ns, now_ns) for region in self.regions(layer))

    @property
    def is_computed(self) -> bool:
        """Whether the device has been told to compute its next layer."""
        return self.step.is_marked(self.regions(self.next_layer))

    @property
    def is_ready(self) -> bool:
        """Whether the device has done so, or the wait for it is to say why it cannot be asked."""
        fence = self.step.fence(self.regions(self.next_layer))
        try:
            return fence is None or fence.is_done()
        except Exception:
            return True


class Dispatcher:
    """The thread and what it has to write; called with the lock of ``changed``, the ledger's."""

    def __init__(
        self,
        engine: WriteEngine,
        events: LayerEvents,
        fences: Fences,
        ledger: Ledger,
        changed: threading.Condition,
    ) -> None:
        self._engine = engine
        self._events = events
        self._fences = fences
        self._ledger = ledger
        self._changed = changed
        self._pieces: list[WrittenPiece] = []
        self._writing: WrittenPiece | None = None
        self._when_written: list[Callable[[], None]] = []
        self._last_turns: dict[int, int] = {}
        self._num_turns = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._pieces)

    def make(self, order: Order, plan: CachePlan) -> WrittenPiece:
        """The order's share in a cache."""
        blocks = order.reservation.message.blocks[order.group_index]
        dst_blocks = [blocks[position] for position in order.dst_positions]
        if self._events.is_live(order.generation):
            step: StepFences = self._events.synchronizer(plan.model_id, order.generation).step
        else:
            step = self._fences.ended_step(len(plan.regions))
        return WrittenPiece(order, plan, dst_blocks, step)

    def add(self, piece: WrittenPiece) -> None:
        """Write it in its turns, as its layers are computed."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="llmdd-dispatch", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._ledger.fail(piece.order.reservation, f"no thread to write with: {error}")
                return
            self._thread = thread
        self._pieces.append(piece)
        self._changed.notify_all()

    def when_quiet(self, is_meant: Callable[[Reservation], bool], tell: Callable[[], None]) -> None:
        """Call ``tell`` when nothing writes for a reservation that is meant.

        They are over, so nothing is begun for them either.
        """
        if self._writing is not None and is_meant(self._writing.reservation):
            self._when_written.append(tell)
        else:
            tell()

    def given_up(self) -> None:
        """Some reservations are over: do not wait for their layers any more."""
        self._changed.notify_all()

    def step_ended(self) -> None:
        self._fences.end_step()

    def stop(self) -> None:
        """Begin no call any more."""
        self._stopping = True
        self._changed.notify_all()

    def join(self) -> None:
        """Without the lock: wait for the call under way, beside which nothing may be finalized, for
        ``MAX_TEARDOWN_S`` at most."""
        if self._thread is not None:
            self._thread.join(MAX_TEARDOWN_S)

    # The dispatch thread

    def _run(self) -> None:
        while True:
            with self._changed:
                piece = self._next()
                if piece is None:
                    return
                self._writing = piece
                self._num_turns += 1
                self._last_turns[piece.cluster_id] = self._num_turns
                goes_alone = self._goes_alone(piece)
            failure = self._write(piece, goes_alone)
            with self._changed:
                self._writing = None
                self._settle(piece, failure)
            if piece.next_layer == piece.plan.num_layers:
                self._ledger.ended(piece, "LLM_SUCCESS")
                self._ledger.record(piece)

    def _next(self) -> WrittenPiece | None:
        """Whose turn it is; None when the thread is to end."""
        while not self._stopping:
            self._pieces = [piece for piece in self._pieces if not piece.reservation.is_over]
            if len(self._pieces) == 1 and self._goes_alone(self._pieces[0]):
                return self._pieces[0]
            computed = [piece for piece in self._pieces if piece.is_computed]
            if computed:
                return self._choose(computed)
            self._changed.wait()
        return None

    def _goes_alone(self, piece: WrittenPiece) -> bool:
        return (
            len(self._pieces) == 1
            and piece.next_layer == 0
            and self._engine.can_push_layers(piece.plan, len(piece.dst_blocks))
        )

    def _choose(self, computed: list[WrittenPiece]) -> WrittenPiece:
        """The D rank whose last turn is the longest ago, of those for which the device is ready.

        If it is for none, the one with the earliest layer: its wait is the shortest.
        """
        ready = [piece for piece in computed if piece.is_ready]
        if ready:
            return min(ready, key=lambda piece: self._last_turns.get(piece.cluster_id, 0))
        return min(computed, key=lambda piece: piece.next_layer)

    def _write(self, piece: WrittenPiece, goes_alone: bool) -> str:
        """One call; the reason if it has failed. What nobody foresaw does not end the thread."""
        try:
            if goes_alone:
                self._write_all(piece)
            else:
                self._write_layer(piece)
        except TransferError as error:
            failure = str(error)
        except Exception:
            logger.exception("push to cluster %x: internal error", piece.cluster_id)
            failure = "an internal error"
        else:
            return ""
        # Before D hears of it, because D then gives the blocks to others.
        self._engine.drop_link(piece.cluster_id)
        return failure

    def _write_layer(self, piece: WrittenPiece) -> None:
        layer = piece.next_layer
        if not self._wait_for_device(piece, layer):
            return
        started_ns = time.monotonic_ns()
        self._engine.push_layer(
            piece.plan, layer, piece.cluster_id, piece.order.src_blocks, piece.dst_blocks
        )
        piece.arrived(layer, started_ns)

    def _write_all(self, piece: WrittenPiece) -> None:
        started_ns = 0

        def wait_for_layer(layer: int) -> bool:
            nonlocal started_ns
            if layer:
                piece.arrived(layer - 1, started_ns)
            is_computed = self._wait_alone(piece, layer)
            started_ns = time.monotonic_ns()
            return is_computed

        num_arrived = self._engine.push_layers(
            piece.plan, piece.cluster_id, piece.order.src_blocks, piece.dst_blocks, wait_for_layer
        )
        if num_arrived == piece.plan.num_layers:
            piece.arrived(num_arrived - 1, started_ns)

    def _wait_alone(self, piece: WrittenPiece, layer: int) -> bool:
        """On a thread of the engine; False when its turns are over, or others wait for theirs."""
        regions = piece.regions(layer)

        def must_end() -> bool:
            return piece.reservation.is_over or self._stopping or len(self._pieces) > 1

        with self._changed:
            self._changed.wait_for(lambda: must_end() or piece.step.is_marked(regions))
            if must_end():
                return False
        return self._wait_for_device(piece, layer)

    def _wait_for_device(self, piece: WrittenPiece, layer: int) -> bool:
        """Whether the layer is computed now, and still wanted."""
        fence = piece.step.fence(piece.regions(layer))
        if fence is not None:
            fence.wait()
        return not piece.reservation.is_over

    def _settle(self, piece: WrittenPiece, failure: str) -> None:
        if failure:
            self._ledger.lose_link(piece.reservation, failure)
        if piece.reservation.is_over or piece.next_layer == piece.plan.num_layers:
            self._pieces.remove(piece)
        if not self._pieces:
            self._last_turns.clear()
        told, self._when_written = self._when_written, []
        for tell in told:
            tell()
