"""P's worker: one transfer to one D rank, and what those that carry it tell the ``Pusher``."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.worker.push_plan import Order, Reservation


@dataclass(slots=True, eq=False)
class Piece(ABC):
    """One order's share in one cache."""

    order: Order
    plan: CachePlan

    @property
    def reservation(self) -> Reservation:
        return self.order.reservation

    @property
    def cluster_id(self) -> int:
        """Of the D rank that gets it."""
        return self.reservation.message.cluster_id

    @property
    def num_bytes(self) -> int:
        return len(self.order.src_blocks) * self.plan.block_len * len(self.plan.regions)

    @abstractmethod
    def layer_times(self) -> list[tuple[int, int, int]]:
        """Per region that has arrived: its index, and when its push was started and acknowledged;
        nanoseconds of the monotonic clock."""


class Ledger(Protocol):
    """What a carrier of pieces tells the ``Pusher``; with its lock, except where it says so."""

    @property
    def is_closed(self) -> bool: ...
    def ended(self, piece: Piece, status: str) -> None:
        """A transfer has ended; any thread, without the lock."""

    def record(self, piece: Piece) -> None:
        """The same, after ``ended``, so that D does not wait for it; without the lock."""

    def fail(self, reservation: Reservation, reason: str) -> None: ...
    def lose_link(self, reservation: Reservation, reason: str) -> None:
        """A call for it has failed: nothing more goes over the link to its D rank."""


def names_of(reservation: Reservation) -> dict[str, Any]:
    """What a trace says of a reservation."""
    message = reservation.message
    return {
        "transfer": message.transfer_id,
        # Hexadecimal: many readers of JSON turn integers of this size into floats.
        "reservation": f"{message.reservation:x}",
        "production": reservation.production,
    }


def named(piece: Piece) -> dict[str, Any]:
    """What a trace says of a piece; ``layer_bytes`` are those of each of its layers."""
    return {
        **names_of(piece.reservation),
        "cache": piece.plan.model_id,
        "layer_bytes": len(piece.order.src_blocks) * piece.plan.block_len,
    }
