"""One ``PeerThread`` with everything around it, and jobs for it."""

from __future__ import annotations

import zmq

from fakes.clock import wait_for
from fakes.pull_peer import FakePullEngine, ReleasePeer
from fakes.summed_memory import SummedMemory
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import PullJob, ReceiveJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.checksum import BlockReader
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.peer import PeerThread
from vllm_llmdd_connector.worker.peer_link import PeerContext
from vllm_llmdd_connector.worker.verify import Verifier

TP_RANK = 3
PLANS = [
    CachePlan(0, 0, 100, 1024, (Region("a", 0, 1024), Region("b", 0, 1024))),
    CachePlan(1, 1, 100, 256, (Region("c", 0, 256),)),
]


class Puller:
    """One ``PeerThread`` and everything around it; keeps a tally of all reports."""

    def __init__(
        self, peer: ReleasePeer, memory: SummedMemory | None = None, **options: float
    ) -> None:
        """With ``memory``, which stands for D's, checksums of all blocks are compared."""
        self.peer = peer
        self.memory = memory
        self.engine = FakePullEngine()
        self.completions = Completions()
        self.stats = TransferStats()
        self.received: list[str] = []
        self.failed: dict[str, str] = {}
        self.ended: list[PeerThread] = []
        self.zmq_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._options = options
        self._counts: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self.thread = self.new_thread(peer.control_address)
        self.thread.start()

    def new_thread(self, control_address: tuple[str, int]) -> PeerThread:
        context = PeerContext(
            config=ConnectorConfig(**self._options),  # type: ignore[arg-type]
            engine=self.engine,
            plans=PLANS if self.memory is None else self.memory.plans,
            completions=self.completions,
            stats=self.stats,
            digests=None,
            zmq_context=self.zmq_context,
            tp_rank=TP_RANK,
            verifier=None if self.memory is None else self._verifier(self.memory),
        )
        return PeerThread(context, self.peer.endpoint, control_address, self.ended.append)

    def _verifier(self, memory: SummedMemory) -> Verifier:
        reader = BlockReader(memory.plans)
        is_cancelled = self.completions.is_cancelled
        return Verifier(memory.plans, "full", reader, self.stats, is_cancelled)

    def submit(self, claim_id: int, **changes: object) -> str:
        """Expect and queue one job; returns its request id."""
        job = make_job(claim_id, **changes)
        self.completions.expect(job.request_id, job.loaded_blocks)
        assert self.thread.submit(job)
        return job.request_id

    def submit_receive(self, claim_id: int, **changes: object) -> str:
        """As ``submit``, for blocks that P pushes."""
        job = make_receive_job(claim_id, **changes)
        self.completions.expect(job.request_id, job.loaded_blocks)
        assert self.thread.submit(job)
        return job.request_id

    def run_first_job(self, control_address: tuple[str, int]) -> str:
        """Another thread for this address, with one job queued before its start; wait for both."""
        thread, job = self.new_thread(control_address), make_job(99)
        self.completions.expect(job.request_id, [])
        assert thread.submit(job)
        thread.start()
        self.wait_reported(job.request_id)
        thread.close()
        return job.request_id

    def wait_reported(self, *request_ids: str) -> None:
        wait_for(lambda: self._drain() or set(request_ids) <= self._reported(), "reports")

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts and failures so far."""
        stats = self.stats.take()
        if stats is not None:
            for total, part in ((self._counts, "counts"), (self._failures, "failures")):
                for name, amount in stats.data[part].items():
                    total[name] = total.get(name, 0) + amount
        return self._counts, self._failures

    def close(self) -> None:
        self.thread.close()
        self._drain()
        self.zmq_context.term()

    def _reported(self) -> set[str]:
        return {*self.received, *self.failed}

    def _drain(self) -> bool:
        """Take what is reported; never says that waiting is over."""
        drained = self.completions.drain()
        if drained is not None:
            for request_id in [*drained.received, *drained.failed]:
                assert request_id not in self._reported(), f"{request_id} was reported twice"
            self.received.extend(drained.received)
            self.failed.update(drained.failed)
        return False


def make_job(claim_id: int, **changes: object) -> PullJob:
    fields: dict[str, object] = {
        "request_id": f"request{claim_id}",
        "transfer_id": f"transfer{claim_id}",
        "claim_id": claim_id,
        "production": claim_id + 1000,
        "secret": "s",
        "control_address": ("127.0.0.1", 1),
        "session": 5,
        "workers": (),
        "groups": [GroupBlocks([1, 2], [5, 6], 0), GroupBlocks([], [], 0)],
        "loaded_blocks": [5, 6],
        "timeout_s": 60.0,
    }
    return PullJob(**{**fields, **changes})  # type: ignore[arg-type]


def make_receive_job(claim_id: int, **changes: object) -> ReceiveJob:
    fields: dict[str, object] = {
        "request_id": f"request{claim_id}",
        "transfer_id": f"transfer{claim_id}",
        "claim_id": claim_id,
        "control_address": ("127.0.0.1", 1),
        "session": 5,
        "workers": (),
        "groups": [WantedBlocks([5, 6], 0), WantedBlocks([], 0)],
        "loaded_blocks": [5, 6],
        "timeout_s": 60.0,
    }
    return ReceiveJob(**{**fields, **changes})  # type: ignore[arg-type]
