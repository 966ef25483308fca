"""P's worker: which blocks of which prompt are to be sent to whom. Pure, no lock and no engine.

A prompt's blocks become known step by step (``PrefillChunk``), D's reservations at any moment
(``Reserve``). Whenever either changes, ``PushPlan`` returns the orders that have become possible.
Each block is ordered once per reservation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_llmdd_connector.control.messages import BlockSpan, Message, Reserve
from vllm_llmdd_connector.metadata import PrefillChunk

MAX_PARKED = 4096
"""Transfers whose reservations wait for their prompt; one beyond pushes out the oldest."""
MAX_PER_TRANSFER = 64
"""Reservations of one transfer: of D's ranks' repetitions, and of several D's."""

SETTLED = 0
"""Generation of blocks that no running step computes."""

Reply = Callable[[Message], None]


@dataclass(slots=True)
class Reservation:
    """One D rank's reservation of blocks for one prompt."""

    message: Reserve
    reply: Reply
    opened_s: float
    next_positions: list[int]
    """Per group, the first position that is not ordered yet."""
    production: int = 0
    """What it is being sent; 0 until the prompt is known."""
    num_open: int = 0
    """Orders of which something has not ended."""
    num_bytes: int = 0
    num_final: tuple[int, ...] = ()
    """Of the prompt, once it is known; see ``block_map.final_blocks``."""
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums by KV cache group and position in the prompt, as far as they are computed."""
    is_over: bool = False
    """Done, void, failed or cancelled: nothing of it counts any more."""

    @property
    def is_ordered(self) -> bool:
        """Whether every wanted block has been ordered."""
        return all(
            position >= span.first + span.count
            for position, span in zip(self.next_positions, self.message.spans, strict=True)
        )


@dataclass(slots=True)
class Order:
    """Blocks of one group for one reservation."""

    reservation: Reservation
    group_index: int
    src_blocks: list[int]
    dst_positions: list[int]
    """Within the reservation."""
    generation: int
    """The step that computes them, or ``SETTLED``."""
    num_left: int = 0
    """Transfers of it that have not ended, one per cache of the group, and with ``integrity`` their
    checksums."""


@dataclass(slots=True)
class _Prefill:
    """One production of one prompt."""

    transfer_id: str
    production: int
    blocks: list[list[int]]
    ends: list[int]
    """Per group, number of blocks from position 0 that are whole when ``generation`` has ended."""
    starts: list[int]
    """Per group, number of blocks that were whole before it."""
    generation: int
    num_final: tuple[int, ...] = ()
    is_lost: bool = False
    """A step that should have computed blocks of it never ended: nothing more is sent."""
    reservations: dict[int, Reservation] = field(default_factory=dict)


class PushPlan:
    """All prompts and reservations of one worker."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        self._block_sizes = tuple(block_sizes)
        self._by_transfer: dict[str, _Prefill] = {}
        self._transfer_of: dict[int, str] = {}
        self._parked: dict[str, dict[int, Reservation]] = {}

    @property
    def num_prefills(self) -> int:
        return len(self._by_transfer)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def advance(self, chunk: PrefillChunk, generation: int) -> list[Order]:
        """Step ``generation`` computes another part of a prompt."""
        prefill = self._by_transfer.get(chunk.transfer_id)
        if prefill is None or prefill.production != chunk.production:
            prefill = self._begin(chunk)
        for known, new in zip(prefill.blocks, chunk.block_ids, strict=True):
            known.extend(new)
        is_last = chunk.end_token >= chunk.num_tokens
        prefill.starts = prefill.ends
        prefill.ends = [
            -(-chunk.end_token // size) if is_last else chunk.end_token // size
            for size in self._block_sizes
        ]
        prefill.generation = generation
        return [
            order
            for reservation in prefill.reservations.values()
            for order in self._orders(prefill, reservation)
        ]

    def reserve(self, message: Reserve, reply: Reply, now_s: float) -> list[Order]:
        """A D rank has blocks for a prompt; repeated messages change nothing."""
        if len(message.spans) != len(self._block_sizes):
            return []
        reservation = Reservation(message, reply, now_s, [span.first for span in message.spans])
        prefill = self._by_transfer.get(message.transfer_id)
        if prefill is None:
            self._park(reservation)
            return []
        known = prefill.reservations
        if message.reservation in known or len(known) >= MAX_PER_TRANSFER:
            return []
        return self._attach(prefill, reservation)

    def cancel(self, transfer_id: str, reservation: int) -> None:
        """D wants nothing more of a reservation."""
        self._forget_parked(transfer_id, reservation)
        prefill = self._by_transfer.get(transfer_id)
        if prefill is not None:
            # Kept as over: a Reserve that was overtaken must not open it again.
            known = prefill.reservations.get(reservation)
            if known is not None:
                known.is_over = True

    def lose(self, is_lost: Callable[[Reservation], bool]) -> list[Reservation]:
        """Returns the lost reservations that are not over; parked ones are forgotten."""
        parked = [r for known in self._parked.values() for r in known.values()]
        begun = [r for prefill in self._by_transfer.values() for r in prefill.reservations.values()]
        lost = [
            reservation
            for reservation in (*parked, *begun)
            if is_lost(reservation) and not reservation.is_over
        ]
        for reservation in lost:
            self._forget_parked(reservation.message.transfer_id, reservation.message.reservation)
        return lost

    def void(self, production: int) -> list[Reservation]:
        """P has given a production up. Returns the reservations that get nothing of it."""
        transfer_id = self._transfer_of.pop(production, None)
        if transfer_id is None:
            return []
        prefill = self._by_transfer.get(transfer_id)
        if prefill is None or prefill.production != production:
            return []
        del self._by_transfer[transfer_id]
        lost = [r for r in prefill.reservations.values() if not r.is_over]
        for reservation in lost:
            reservation.is_over = True
        return lost

    def void_step(self, generation: int) -> list[Reservation]:
        """A step never ended. Returns the reservations that wait for what it should compute."""
        lost: list[Reservation] = []
        for prefill in self._by_transfer.values():
            if prefill.generation == generation:
                prefill.is_lost = True
                lost.extend(r for r in prefill.reservations.values() if not r.is_over)
        return lost

    def is_lost(self, transfer_id: str) -> bool:
        """Whether what P knows of a prompt comes from a step that never ended."""
        prefill = self._by_transfer.get(transfer_id)
        return prefill is not None and prefill.is_lost

    def is_done(self, reservation: Reservation) -> bool:
        """Whether all of it has arrived while the production was valid."""
        return not reservation.is_over and reservation.is_ordered and not reservation.num_open

    def _begin(self, chunk: PrefillChunk) -> _Prefill:
        num_groups = len(self._block_sizes)
        prefill = _Prefill(
            chunk.transfer_id,
            chunk.production,
            [[] for _ in range(num_groups)],
            [0] * num_groups,
            [0] * num_groups,
            SETTLED,
            chunk.num_final,
        )
        self._by_transfer[chunk.transfer_id] = prefill
        self._transfer_of[chunk.production] = chunk.transfer_id
        for reservation in self._parked.pop(chunk.transfer_id, {}).values():
            self._attach(prefill, reservation)
        return prefill

    def _park(self, reservation: Reservation) -> None:
        transfer_id = reservation.message.transfer_id
        if transfer_id not in self._parked and len(self._parked) >= MAX_PARKED:
            del self._parked[next(iter(self._parked))]
        parked = self._parked.setdefault(transfer_id, {})
        if len(parked) < MAX_PER_TRANSFER:
            parked.setdefault(reservation.message.reservation, reservation)

    def _forget_parked(self, transfer_id: str, reservation: int) -> None:
        parked = self._parked.get(transfer_id, {})
        parked.pop(reservation, None)
        if not parked:
            self._parked.pop(transfer_id, None)

    def _attach(self, prefill: _Prefill, reservation: Reservation) -> list[Order]:
        prefill.reservations[reservation.message.reservation] = reservation
        reservation.production = prefill.production
        reservation.num_final = prefill.num_final
        return list(self._orders(prefill, reservation))

    def _orders(self, prefill: _Prefill, reservation: Reservation) -> Iterator[Order]:
        """What has become possible: blocks of earlier steps apart from those of the last one."""
        if reservation.is_over or prefill.is_lost:
            return
        for group, span in enumerate(reservation.message.spans):
            start, end = prefill.starts[group], prefill.ends[group]
            for last, generation in ((start, SETTLED), (end, prefill.generation)):
                order = self._order(prefill, reservation, group, span, last, generation)
                if order is not None:
                    yield order

    @staticmethod
    def _order(
        prefill: _Prefill,
        reservation: Reservation,
        group: int,
        span: BlockSpan,
        end: int,
        generation: int,
    ) -> Order | None:
        first = reservation.next_positions[group]
        last = min(end, span.first + span.count)
        if first >= last:
            return None
        reservation.next_positions[group] = last
        reservation.num_open += 1
        positions = list(range(first - span.first, last - span.first))
        return Order(reservation, group, prefill.blocks[group][first:last], positions, generation)
