"""What crosses between the scheduler and its workers in each engine step.

``StepMessage`` goes down, ``WorkerReport`` comes up; both are pickled by vLLM's executor, inside
one server.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.layout.kv_layout import GroupGeometry
from vllm_llmdd_connector.scheduler.block_map import GroupBlocks


@dataclass(slots=True)
class SentPrompt:
    """P, with ``kv_digest`` only: digest a finished prompt's blocks while they are held."""

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class PullJob:
    """D: fetch one request's blocks from P."""

    request_id: str
    transfer_id: str
    claim_id: int
    production: int
    secret: str
    control_address: tuple[str, int]
    """P's control channel, which confirms releases."""
    session: int
    workers: tuple[WorkerEndpoint, ...]
    """P's ranks; each rank of D pulls from the one of its own number."""
    groups: list[GroupBlocks]
    """Per KV cache group. Empty when the block tables did not fit: reported as failed."""
    loaded_blocks: list[int]
    """With one KV cache group, D's blocks for the remote tokens: vLLM before 0.30 is told these on
    a failure. Empty with several groups."""
    timeout_s: float
    """From the arrival of this message at the worker: after it the job is no longer begun."""


@dataclass(slots=True)
class StepMessage(KVConnectorMetadata):
    """Scheduler to workers. Empty in a step without transfer work."""

    sent_prompts: list[SentPrompt] = field(default_factory=list)
    pulls: list[PullJob] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    """D requests that were aborted while their blocks were being fetched."""

    @property
    def is_empty(self) -> bool:
        return not (self.sent_prompts or self.pulls or self.cancels)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """Workers to scheduler; merged over the ranks."""

    failed: dict[str, str] = field(default_factory=dict)
    """D: request id to the first rank's reason."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport)
        for request_id, reason in other.failed.items():
            self.failed.setdefault(request_id, reason)
        return self


@dataclass(slots=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """One worker's part of what peers learn at first contact."""

    tp_rank: int
    endpoint: WorkerEndpoint | None
    """None on an engine that is only a consumer: nobody dials it."""
    groups: tuple[GroupGeometry, ...]
