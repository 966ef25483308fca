"""A ``Pusher`` on an engine whose transfers end when the test says so, and D ranks that reserve."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.clock import PATIENCE_S, FakeClock, wait_for
from fakes.fake_push import FakeSynchronizer
from vllm_llmdd_connector.control.messages import BlockSpan, CacheToken, Cancel, Message, Reserve
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.push import Pusher
from vllm_llmdd_connector.worker.push_sums import PushSums

P, D, OTHER_D = 0xA, 0xD, 0xE
BLOCK_LEN = 64
SUCCESS = "LLM_SUCCESS"


def region(name: str) -> Region:
    return Region(name, 0, BLOCK_LEN, (name,))


ONE_CACHE = (CachePlan(0, 0, 8, BLOCK_LEN, (region("a"), region("b"))),)
TWO_CACHES = (*ONE_CACHE, CachePlan(1, 0, 8, BLOCK_LEN, (region("c"),)))


@dataclass
class HeldTask:
    """A transfer that ends when the test gives it a status."""

    plan: CachePlan
    synchronizer: FakeSynchronizer
    cluster_id: int
    token: int
    src_blocks: list[int]
    dst_positions: list[int]
    status: str = ""
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self, status: str = SUCCESS) -> None:
        self.status = status
        self.ended.set()

    def wait(self) -> str:
        assert self.ended.wait(PATIENCE_S), "nobody ended a transfer"
        return self.status

    def layer_times(self) -> list[tuple[int, int, int]]:
        """None: only a trace asks for them."""
        return []


class HeldEngine:
    """Starts transfers and lets the test end them."""

    cluster_id = P
    has_reservations = True

    def __init__(self) -> None:
        self.tasks: list[HeldTask] = []
        self.start_error = ""

    def new_synchronizer(self, num_layers: int) -> FakeSynchronizer:
        return FakeSynchronizer(num_layers)

    def start_push(
        self,
        plan: CachePlan,
        synchronizer: Any,
        peer_cluster_id: int,
        token: int,
        src_blocks: list[int],
        dst_positions: list[int],
    ) -> HeldTask:
        if self.start_error:
            raise TransferError(self.start_error)
        task = HeldTask(plan, synchronizer, peer_cluster_id, token, src_blocks, dst_positions)
        self.tasks.append(task)
        return task


class PushSide:
    """One P worker rank with blocks of 16 tokens; ``answers`` is what D ranks were told."""

    def __init__(
        self,
        clock: FakeClock,
        plans: Sequence[CachePlan] = ONE_CACHE,
        sums: PushSums | None = None,
    ) -> None:
        self.engine = HeldEngine()
        self.stats = TransferStats()
        self.plans = list(plans)
        self.pusher = Pusher(self.engine, plans, [16], clock, self.stats, sums=sums)
        self.answers: list[Message] = []

    @property
    def tasks(self) -> list[HeldTask]:
        return self.engine.tasks

    @property
    def senders(self) -> dict[int, Any]:
        """Those of the pusher, by D rank."""
        return self.pusher._carrier.by_cluster  # type: ignore[union-attr]

    def reserve(self, reservation: int = 1, **changes: Any) -> None:
        """Three blocks of transfer ``t``, by default."""
        fields = {
            "to_cluster": P,
            "cluster_id": D,
            "transfer_id": "t",
            "reservation": reservation,
            "link_number": 5,
            "spans": (BlockSpan(first=0, count=3),),
            "tokens": tuple(
                CacheToken(model_id=plan.model_id, token=100 + plan.model_id) for plan in self.plans
            ),
        }
        self.pusher.handle(Reserve(**{**fields, **changes}), self.answers.append)

    def cancel(self, reservation: int = 1, to_cluster: int = P) -> None:
        message = Cancel(to_cluster=to_cluster, transfer_id="t", reservation=reservation)
        self.pusher.handle(message, self.answers.append)

    def begin(self, end: int = 40, *blocks: int, production: int = 7, **changes: Any) -> None:
        """Begin a step that computes a prompt of 40 tokens up to ``end``."""
        fields = {"transfer_id": "t", "num_tokens": 40, "block_ids": (blocks or (4, 5, 6),)}
        chunk = PrefillChunk(production=production, end_token=end, **{**fields, **changes})
        self.pusher.begin_step([chunk])

    def step(self, end: int = 40, *blocks: int, **changes: Any) -> None:
        self.begin(end, *blocks, **changes)
        self.pusher.end_step()

    def wait_answers(self, number: int = 1) -> list[Message]:
        wait_for(lambda: len(self.answers) >= number, f"{number} answers")
        return self.answers

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        stats = self.stats.take()
        return ({}, {}) if stats is None else (stats.data["counts"], stats.data["failures"])

    def close(self) -> None:
        """As a worker does: the engine's end ends what is under way."""
        self.pusher.close()
        for task in self.tasks:
            if not task.ended.is_set():
                task.end("LLM_FAILED")
        wait_for(lambda: not self.threads(), "the ends of all threads")

    def threads(self, cluster_id: int | None = None) -> list[threading.Thread]:
        name = "llmdd-push-" if cluster_id is None else f"llmdd-push-{cluster_id:x}"
        return [thread for thread in threading.enumerate() if thread.name.startswith(name)]
