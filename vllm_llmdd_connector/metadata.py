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
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.layout.kv_layout import GroupGeometry


@dataclass(slots=True)
class SentPrompt:
    """P, with ``kv_digest`` only: digest a finished prompt's blocks while they are held."""

    request_id: str
    transfer_id: str
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class PrefillChunk:
    """P: what this step computes of a prompt that a D may have pushed to it."""

    transfer_id: str
    production: int
    """Of this computation; another one after a preemption."""
    num_tokens: int
    """Prompt length."""
    block_ids: tuple[tuple[int, ...], ...]
    """The prompt's blocks per KV cache group that the worker has not been told of yet."""
    end_token: int
    """Prompt tokens whose KV is there when the step ends."""
    num_final: tuple[int, ...] = ()
    """With ``integrity`` only: see ``block_map.final_blocks``."""


@dataclass(slots=True)
class LeasedPrompt:
    """P, with ``integrity`` only: a prompt whose blocks are held for whoever knows the secret."""

    production: int
    secret: str
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV cache group, from position 0."""
    num_final: tuple[int, ...]
    """As in ``PrefillChunk``."""


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
class ReceiveJob:
    """D: reserve one request's blocks and have P push into them."""

    request_id: str
    transfer_id: str
    claim_id: int
    control_address: tuple[str, int]
    """P's scheduler, which is told when the blocks are there."""
    session: int
    workers: tuple[WorkerEndpoint, ...]
    """P's ranks; each rank of D receives from the one of its own number."""
    groups: list[WantedBlocks]
    """Per KV cache group. Empty when the block table did not fit: reported as failed."""
    loaded_blocks: list[int]
    """As in ``PullJob``."""
    timeout_s: float
    """From the arrival of this message at the worker to the last block."""


Job = PullJob | ReceiveJob


@dataclass(slots=True)
class StepMessage(KVConnectorMetadata):
    """Scheduler to workers. Empty in a step without transfer work."""

    sent_prompts: list[SentPrompt] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    traced: list[PrefillChunk] = field(default_factory=list)
    """P, with ``trace_dir`` only: as ``chunks``, of prompts that D will pull."""
    voids: list[int] = field(default_factory=list)
    """P: productions whose blocks are not held any more; applied before the step writes."""
    leased: list[LeasedPrompt] = field(default_factory=list)
    """P, with ``integrity`` only: leases that are new."""
    unleased: list[int] = field(default_factory=list)
    """P, with ``integrity`` only: productions whose leases have ended; as ``voids``."""
    jobs: list[Job] = field(default_factory=list)
    cancels: dict[str, str] = field(default_factory=dict)
    """D requests whose blocks are not wanted any more while they are being fetched, with the
    reason; empty for an abort."""

    @property
    def is_empty(self) -> bool:
        return not (self.sent_prompts or self.chunks or self.traced or self.jobs or self.cancels)


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
    can_push: bool
    """Whether the rank's engine can push, or be pushed into."""
    kv_format: str
    """See ``worker.kv_format``."""
