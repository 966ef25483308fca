"""One worker rank of the connector with two layers, and orders for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fakes.clock import wait_for
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.metadata import Hold, PullJob, StepMessage, WorkerReport
from vllm_llmdd_connector.scheduler.block_map import GroupBlocks
from vllm_llmdd_connector.worker.worker import WorkerConnector

NUM_BLOCKS = 8
SECRET = "secret"


class FullAttentionSpec:
    """Its name is what counts."""

    block_size = 16


class Rank:
    """One worker with two layers; every byte of block ``b`` is ``fill + b``."""

    def __init__(self, kv_role: str, fill: int, **options: Any) -> None:
        transfer = SimpleNamespace(
            engine_id=kv_role,
            kv_role=kv_role,
            is_kv_producer=kv_role == "kv_producer",
            is_kv_consumer=kv_role == "kv_consumer",
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=["a", "b"])
        config: Any = SimpleNamespace(kv_transfer_config=transfer)
        kv_cache_config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        self.worker = WorkerConnector(config, kv_cache_config, ConnectorConfig(**options), 0)
        self.caches = {name: torch.empty(NUM_BLOCKS, 64, dtype=torch.uint8) for name in "ab"}
        for cache in self.caches.values():
            cache[:] = torch.arange(fill, fill + NUM_BLOCKS, dtype=torch.uint8)[:, None]
        self.worker.register_kv_caches(self.caches)
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self.sent: set[str] = set()
        self.report = WorkerReport()

    def step(self, **orders: Any) -> None:
        """One engine step with these orders."""
        self.worker.bind(StepMessage(**orders))
        sent, drained = self.worker.poll()
        assert not self.sent & sent, "a lease was reported twice"
        assert not self.reported & drained.received, "a request was reported twice"
        self.sent |= sent
        self.received |= drained.received
        self.failed |= drained.failed.keys()
        report = self.worker.take_report()
        if report is not None:
            self.report.aggregate(report)

    @property
    def reported(self) -> set[str]:
        return self.received | self.failed

    @property
    def endpoint(self) -> WorkerEndpoint:
        handshake = self.worker.handshake
        assert handshake is not None
        assert handshake.endpoint is not None
        return handshake.endpoint

    def blocks(self) -> list[list[int]]:
        """First byte of each block by layer."""
        return [cache[:, 0].tolist() for cache in self.caches.values()]


def hold(production: int = 1) -> Hold:
    return Hold(production, f"p{production}", SECRET)


def pull(endpoint: WorkerEndpoint, claim_id: int = 1, production: int = 1) -> PullJob:
    return PullJob(
        request_id=f"d{claim_id}",
        transfer_id=f"p{production}",
        claim_id=claim_id,
        production=production,
        secret=SECRET,
        workers=(endpoint,),
        groups=[GroupBlocks([1, 2], [5, 4], 0)],
        loaded_blocks=[5, 4],
        timeout_s=60.0,
    )


def run(d: Rank, *request_ids: str) -> None:
    """Empty steps until these requests are reported."""

    def all_reported() -> bool:
        d.step()
        return set(request_ids) <= d.reported

    wait_for(all_reported, f"reports of {request_ids}")
