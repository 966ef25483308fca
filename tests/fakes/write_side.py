"""A ``Pusher`` on an engine without reservations, whose calls end when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.clock import PATIENCE_S, FakeClock, wait_for
from fakes.push_side import BLOCK_LEN, D, P, PushSide
from vllm_llmdd_connector.control.messages import CancelAll
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.push import Pusher

D_BLOCKS = ((20, 21, 22),)


def pair(layer: str) -> tuple[Region, Region]:
    """K and V."""
    return (
        Region(f"{layer}#0", 0, BLOCK_LEN, (layer,)),
        Region(f"{layer}#1", 0, BLOCK_LEN, (layer,)),
    )


PAIRS = (CachePlan(0, 0, 8, BLOCK_LEN, (*pair("a"), *pair("b"))),)
"""Layers a and b with two tensors each."""


@dataclass
class Write:
    """One layer that is being written, until the test ends it."""

    cluster_id: int
    layer: int
    is_alone: bool
    src_blocks: list[int]
    dst_blocks: list[int]
    ended: threading.Event = field(default_factory=threading.Event)
    error: str = ""

    def end(self, error: str = "") -> None:
        self.error = error
        self.ended.set()

    @property
    def name(self) -> str:
        return f"{self.cluster_id:x}{self.layer}{'*' if self.is_alone else ''}"


class FakeFence:
    """A point of the device's work that the test reaches."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.is_awaited = threading.Event()

    def wait(self) -> None:
        self.is_awaited.set()
        assert self.reached.wait(PATIENCE_S), "the device never got there"

    def is_done(self) -> bool:
        return self.reached.is_set()


class WriteEngine:
    """Writes one layer at a time; the test ends each, or has them end by themselves."""

    cluster_id = P
    has_reservations = False

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.fences: list[FakeFence] = []
        self.has_device = False
        self.holds = True
        self.dropped: list[int] = []
        self.at_once = 0
        self.most_at_once = 0

    def new_synchronizer(self, num_layers: int) -> Any:
        raise AssertionError("an extension of the host engine")

    def start_push(self, *args: Any) -> Any:
        raise AssertionError("an extension of the host engine")

    def record_fence(self) -> FakeFence | None:
        if not self.has_device:
            return None
        self.fences.append(FakeFence())
        return self.fences[-1]

    def push_layer(
        self,
        plan: CachePlan,
        layer: int,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
    ) -> None:
        self._write(Write(peer_cluster_id, layer, False, src_blocks, dst_blocks))

    def can_push_layers(self, plan: CachePlan, num_blocks: int) -> bool:
        return plan.tensors_per_layer == 2

    def push_layers(
        self,
        plan: CachePlan,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
        wait_for_layer: Callable[[int], bool],
    ) -> int:
        for layer in range(plan.num_layers):
            if not wait_for_layer(layer):
                return layer
            self._write(Write(peer_cluster_id, layer, True, src_blocks, dst_blocks))
        return plan.num_layers

    def drop_link(self, peer_cluster_id: int) -> None:
        self.dropped.append(peer_cluster_id)

    def _write(self, write: Write) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.writes.append(write)
        if self.holds:
            assert write.ended.wait(PATIENCE_S), f"nobody ended {write.name}"
        self.at_once -= 1
        if write.error:
            raise TransferError(write.error)


class WriteSide(PushSide):
    """As ``PushSide``; D ranks name their blocks."""

    def __init__(self, clock: FakeClock, plans: Sequence[CachePlan] = PAIRS) -> None:
        self.device = WriteEngine()
        self.stats = TransferStats()
        self.plans = list(plans)
        self.pusher = Pusher(self.device, plans, [16], clock, self.stats)
        self.answers = []

    def reserve(self, reservation: int = 1, **changes: Any) -> None:
        fields = {"tokens": (), "blocks": D_BLOCKS}
        super().reserve(reservation, **{**fields, **changes})

    def cancel_all(self, link_number: int, to_cluster: int = P) -> None:
        """``D`` is about to make this link; ``reserve`` is for link 5."""
        message = CancelAll(to_cluster=to_cluster, cluster_id=D, link_number=link_number)
        self.pusher.handle(message, self.answers.append)

    @property
    def names(self) -> list[str]:
        return [write.name for write in self.device.writes]

    def next_write(self, number: int) -> Write:
        """Wait for the ``number``-th one, which runs then."""
        wait_for(lambda: len(self.device.writes) >= number, f"write {number}")
        return self.device.writes[number - 1]

    def end_writes(self, *names: str) -> None:
        """The next ones are these, and succeed."""
        done = sum(write.ended.is_set() for write in self.device.writes)
        for number, name in enumerate(names, done + 1):
            write = self.next_write(number)
            assert write.name == name
            write.end()

    def close(self) -> None:
        self.device.holds = False
        for fence in self.device.fences:
            fence.reached.set()
        for write in self.device.writes:
            write.end(write.error)
        self.pusher.close()
