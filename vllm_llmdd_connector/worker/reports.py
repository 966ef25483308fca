"""D's worker: what becomes of one peer's requests, told once to vLLM, log, metrics and trace."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import Job
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.peer_link import PeerContext

logger = get_logger(__name__)


@dataclass(slots=True)
class Transfer:
    """One job that is not reported yet."""

    job: Job
    fence: Fence | None
    """Device work that may still use the job's blocks."""
    started_s: float
    deadline_s: float
    stage: str = "link"
    """Where it fails if the peer is lost now."""


class Reports:
    """Of one peer's thread."""

    def __init__(
        self, context: PeerContext, endpoint: WorkerEndpoint, forget: Callable[[str], object]
    ) -> None:
        """``forget`` is called with the id of each request before it is reported."""
        self._context = context
        self._endpoint = endpoint
        self._forget = forget

    def succeeded(self, transfer: Transfer) -> None:
        """The request's blocks are there."""
        context, job = self._context, transfer.job
        context.trace.event("arrival", **names_of(job))
        num_bytes = 0
        for plan, dst_blocks, first in self._arrived(job):
            num_bytes += len(dst_blocks) * plan.block_len * len(plan.regions)
            if context.digests is not None:
                context.digests.write(
                    "recv", job.request_id, job.transfer_id, plan, first, dst_blocks
                )
        context.stats.count("recv_bytes", num_bytes)
        context.stats.count("recv_blocks", sum(len(group.dst_blocks) for group in job.groups))
        context.stats.observe("recv_seconds", time.monotonic() - transfer.started_s)
        context.stats.count("recv_requests")
        self._forget(job.request_id)
        context.completions.succeed(job.request_id)

    def failed(self, transfer: Transfer, stage: str, reason: str) -> None:
        """The request's blocks are not valid."""
        context, job = self._context, transfer.job
        self._forget(job.request_id)
        context.trace.event("failed", **names_of(job), stage=stage, reason=reason)
        if not context.completions.is_cancelled(job.request_id):
            context.stats.count_failure(stage)
            logger.error(
                "request %s: stage %s failed, prefill server %s, cluster %x: %s",
                job.request_id,
                stage,
                self._endpoint.host,
                self._endpoint.cluster_id,
                reason,
            )
        context.completions.fail(job.request_id, f"{stage}: {reason}")

    def _arrived(self, job: Job) -> Iterator[tuple[CachePlan, list[int], int]]:
        for plan in self._context.plans:
            group = job.groups[plan.group_index]
            if group.dst_blocks:
                yield plan, group.dst_blocks, group.first_position


def names_of(job: Job) -> dict[str, Any]:
    """What a trace calls a request."""
    return {"transfer": job.transfer_id, "request": job.request_id}
