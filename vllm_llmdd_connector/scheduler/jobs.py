"""The orders of D's scheduler to its workers: which blocks to fetch into, and from whom."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_llmdd_connector.control.session import Granted, Invited
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import PullJob, ReceiveJob
from vllm_llmdd_connector.params import AnyTicket
from vllm_llmdd_connector.scheduler.block_map import map_blocks, wanted_blocks

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What is to be fetched for one request: the tokens in [start, end)."""

    request_id: str
    ticket: AnyTicket
    claim_id: int
    block_ids: Sequence[Sequence[int]]
    """D's blocks per KV cache group."""
    block_sizes: Sequence[int]
    start: int
    """D's local hit in tokens."""
    end: int
    timeout_s: float

    def loaded_blocks(self) -> list[int]:
        if len(self.block_ids) != 1:
            return []
        size = self.block_sizes[0]
        return list(self.block_ids[0][self.start // size : -(-self.end // size)])


def pull_job(order: JobOrder, granted: Granted) -> PullJob:
    """Without groups when the tables do not fit, which the workers report as failed."""
    groups: list[GroupBlocks] = []
    try:
        groups = map_blocks(
            granted.block_ids, order.block_ids, order.block_sizes, order.start, order.end
        )
    except TransferError as error:
        logger.error("request %s: P's blocks do not fit D's: %s", order.request_id, error)
    return PullJob(
        request_id=order.request_id,
        transfer_id=order.ticket.transfer_id,
        claim_id=order.claim_id,
        production=granted.production,
        secret=granted.secret,
        control_address=order.ticket.address,
        session=granted.session,
        workers=granted.workers,
        groups=groups,
        loaded_blocks=order.loaded_blocks(),
        timeout_s=order.timeout_s,
    )


def receive_job(order: JobOrder, invited: Invited) -> ReceiveJob:
    """As ``pull_job``, for blocks that P will push."""
    groups: list[WantedBlocks] = []
    try:
        groups = wanted_blocks(order.block_ids, order.block_sizes, order.start, order.end)
    except TransferError as error:
        logger.error("request %s: no blocks to reserve: %s", order.request_id, error)
    return ReceiveJob(
        request_id=order.request_id,
        transfer_id=order.ticket.transfer_id,
        claim_id=order.claim_id,
        control_address=order.ticket.address,
        session=invited.session,
        workers=invited.workers,
        groups=groups,
        loaded_blocks=order.loaded_blocks(),
        timeout_s=order.timeout_s,
    )
