"""D's requests: from kv_transfer_params to the report that their blocks have arrived.

Runs on the scheduling thread only. A request's states:

============= ==================== =============
state         event                next
============= ==================== =============
``CLAIMING``  P granted or invited ``MATCHED``
``CLAIMING``  refused, too late    ``LOCAL``
``MATCHED``   blocks allocated     ``RECEIVING``
``MATCHED``   nothing needed       ``LOCAL``
``MATCHED``   lease gone           ``LOCAL``
``RECEIVING`` all ranks reported   ``READY``
``RECEIVING`` a rank failed        ``FAILED``
============= ==================== =============

A grant is for blocks that P has computed, which D pulls; an invitation is for a prompt that P is
about to compute, whose blocks it pushes into those that D reserves.

Only ``CLAIMING`` and ``MATCHED`` may still ask for remote blocks, so a request that vLLM preempts
after its load, or reschedules after a failure, is computed locally.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from vllm_llmdd_connector.config import ConnectorConfig, is_allowed_peer
from vllm_llmdd_connector.control.session import Granted, InQueue, Invited, Outcome, Refused
from vllm_llmdd_connector.errors import RemoteProtocolError, TransferError
from vllm_llmdd_connector.ids import new_claim_id
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import Job, PullJob, ReceiveJob, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import (
    AnyTicket,
    Appointment,
    read_appointment,
    read_ticket,
    request_prompt_hash,
    transfer_id_of,
    wants_remote_prefill,
)
from vllm_llmdd_connector.scheduler.block_map import (
    NULL_BLOCK,
    GroupBlocks,
    WantedBlocks,
    map_blocks,
    wanted_blocks,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class RequestState(Enum):
    CLAIMING = "claiming"
    MATCHED = "matched"
    RECEIVING = "receiving"
    READY = "ready"
    FAILED = "failed"
    LOCAL = "local"


_OPEN = frozenset({RequestState.CLAIMING, RequestState.MATCHED})
"""Nothing has been decided about the request's blocks yet."""


class Control(Protocol):
    """What the consumer needs of the control plane; ``ControlClient`` and the tests' fake have
    it."""

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None: ...
    def has_blocks(self, claim_id: int, ticket: AnyTicket) -> None: ...
    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None: ...
    def finish(self, claim_id: int, ticket: AnyTicket) -> None: ...
    def take_outcomes(self) -> list[Outcome]: ...


@dataclass(slots=True)
class ConsumerRequest:
    """One request at D that came with a ticket."""

    request_id: str
    ticket: AnyTicket
    claim_id: int
    state: RequestState
    deadline_s: float
    """Of the claim's answer."""
    offer: Granted | Invited | None = None
    num_local_tokens: int = 0
    """D's local prefix hit when vLLM last asked."""


class Consumer:
    """The consumer half of the scheduler-side connector."""

    def __init__(
        self,
        config: ConnectorConfig,
        block_sizes: Sequence[int],
        control: Control,
        clock: Callable[[], float],
        stats: TransferStats,
        groups: Sequence[Group] = (),
    ) -> None:
        self._config = config
        self._groups = tuple(groups)
        self._block_sizes = tuple(block_sizes)
        self._control = control
        self._clock = clock
        self._stats = stats
        self._requests: dict[str, ConsumerRequest] = {}
        self._by_claim: dict[int, ConsumerRequest] = {}
        self._jobs: list[Job] = []
        self._cancels: dict[str, str] = {}

    def on_new_request(self, request: "Request") -> None:
        """Start the claim before vLLM first tries to schedule the request."""
        self._known(request)

    def num_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that P holds beyond D's local prefix hit; None while P's answer is awaited."""
        entry = self._known(request)
        if entry is None:
            return 0, False
        self._apply_outcomes()
        if entry.state is RequestState.CLAIMING:
            if self._clock() < entry.deadline_s:
                return None, False
            # Its answer may still be on the way, and would be renewed for nobody.
            self._drop(entry)
            self._fall_back(entry, _stage(entry), "P did not answer in time")
        if entry.state is not RequestState.MATCHED:
            return 0, False
        entry.num_local_tokens = num_computed_tokens
        num_tokens = entry.ticket.num_tokens - num_computed_tokens
        # vLLM computes the last token itself in any case, to sample from it. It is not counted as
        # loaded either: vLLM would let a sliding window move past the block that it still reads.
        return (num_tokens - 1, True) if num_tokens > 1 else (0, False)

    def is_open(self, request_id: str) -> bool:
        """Whether an allocation for this request still decides about its remote blocks."""
        entry = self._requests.get(request_id)
        return entry is not None and entry.state in _OPEN

    def on_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """vLLM allocated blocks: fetch into them, or tell P that nothing is needed."""
        entry = self._requests.get(request_id)
        if entry is None or entry.state not in _OPEN:
            return
        if num_external_tokens <= 0 or entry.offer is None:
            self._give_up_claim(entry)
            self._stats.count("recv_not_needed")
            return
        end = entry.num_local_tokens + num_external_tokens
        if isinstance(entry.offer, Granted):
            self._jobs.append(self._pull_job(entry, entry.offer, block_ids, end))
        else:
            self._jobs.append(self._receive_job(entry, entry.offer, block_ids, end))
            self._control.has_blocks(entry.claim_id, entry.ticket)
        entry.state = RequestState.RECEIVING

    def fill(self, step: StepMessage) -> None:
        """Add this step's jobs and cancels to the step message."""
        if self._by_claim:
            self._apply_outcomes()
        step.jobs, self._jobs = self._jobs, []
        step.cancels, self._cancels = self._cancels, {}

    def on_failed(self, failed: dict[str, str]) -> None:
        """Some rank could not load these requests; the ranks' common report may come in a later
        step."""
        for request_id in failed:
            entry = self._requests.get(request_id)
            if entry is not None and entry.state is RequestState.RECEIVING:
                entry.state = RequestState.FAILED
                self._by_claim.pop(entry.claim_id, None)
                self._drop(entry)
                if isinstance(entry.offer, Invited):
                    # After the drop P sends nothing more, and other ranks may wait for it.
                    self._cancels[request_id] = "another rank failed"

    def on_received(self, request_ids: set[str]) -> None:
        """All ranks have reported these requests."""
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None and entry.state is RequestState.RECEIVING:
                entry.state = RequestState.READY
                self._by_claim.pop(entry.claim_id, None)
                self._control.finish(entry.claim_id, entry.ticket)

    def request_finished(self, request: "Request") -> None:
        """The request is over at D, normally or by an abort at any moment."""
        entry = self._requests.pop(request.request_id, None)
        if entry is None:
            self._release_rejected(request)
            return
        self._by_claim.pop(entry.claim_id, None)
        if entry.state is RequestState.RECEIVING:
            self._cancels[entry.request_id] = ""
        if entry.state in _OPEN or entry.state is RequestState.RECEIVING:
            self._drop(entry)

    def _known(self, request: "Request") -> ConsumerRequest | None:
        """The request's entry; made, and its claim sent, at first sight."""
        entry = self._requests.get(request.request_id)
        if entry is None and wants_remote_prefill(request.kv_transfer_params):
            entry = self._admit(request)
        return entry

    def _admit(self, request: "Request") -> ConsumerRequest | None:
        if getattr(request, "abort_immediately", False):
            return None
        ticket = self._checked_ticket(request)
        if ticket is None:
            return None
        deadline_s = self._clock() + self._config.first_contact_timeout_s
        entry = ConsumerRequest(
            request.request_id, ticket, new_claim_id(), RequestState.CLAIMING, deadline_s
        )
        self._requests[entry.request_id] = entry
        self._by_claim[entry.claim_id] = entry
        self._control.claim(entry.claim_id, ticket, deadline_s)
        return entry

    def _checked_ticket(self, request: "Request") -> AnyTicket | None:
        """The ticket, or None with the params switched off: such a request is prefilled locally."""
        params = request.kv_transfer_params
        assert params is not None
        try:
            ticket = self._read_ticket(params, request)
            self._check_ticket(ticket, request)
        except RemoteProtocolError as error:
            params["do_remote_prefill"] = False
            self._stats.count_failure("params")
            logger.warning("request %s: prefilled locally: %s", request.request_id, error)
            return None
        return ticket

    @staticmethod
    def _read_ticket(params: dict[str, Any], request: "Request") -> AnyTicket:
        """The sequential flow's ticket, or the concurrent flow's appointment."""
        transfer_id = transfer_id_of(params)
        if transfer_id is None or isinstance(params.get("llmdd"), dict):
            return read_ticket(params)
        prompt_id = request_prompt_hash(request)
        if prompt_id is None:
            raise RemoteProtocolError("a prompt of embeddings cannot be prefilled elsewhere")
        return read_appointment(params, transfer_id, request.num_prompt_tokens, prompt_id)

    def _check_ticket(self, ticket: AnyTicket, request: "Request") -> None:
        if not is_allowed_peer(ticket.host, self._config.allowed_peers):
            raise RemoteProtocolError(
                f"kv_transfer_params names the prefill server {ticket.host}, which is not in "
                f"allowed_peers {list(self._config.allowed_peers)}; add it there if it is yours"
            )
        if ticket.num_tokens != request.num_prompt_tokens:
            raise RemoteProtocolError(
                f"the prompt has {request.num_prompt_tokens} tokens here, {ticket.num_tokens} at "
                "the prefill server (one of several prompts or choices of a request?)"
            )
        if ticket.prompt_hash != request_prompt_hash(request):
            raise RemoteProtocolError(
                "the prompt differs from the one that was prefilled "
                "(one of several prompts or choices of a request?)"
            )

    def _release_rejected(self, request: "Request") -> None:
        """D's frontend refused the request: it comes only to be aborted, with a placeholder
        prompt."""
        params = request.kv_transfer_params
        if not getattr(request, "abort_immediately", False) or not wants_remote_prefill(params):
            return
        assert params is not None
        try:
            ticket = self._read_ticket(params, request)
        except RemoteProtocolError:
            return
        if is_allowed_peer(ticket.host, self._config.allowed_peers):
            deadline_s = self._clock() + self._config.first_contact_timeout_s
            self._control.drop(new_claim_id(), ticket, deadline_s)
            self._stats.count("recv_not_needed")

    def _apply_outcomes(self) -> None:
        for outcome in self._control.take_outcomes():
            entry = self._by_claim.get(outcome.claim_id)
            if entry is not None:
                self._apply(entry, outcome)

    def _apply(self, entry: ConsumerRequest, outcome: Outcome) -> None:
        match outcome:
            case Granted() | Invited() if entry.state is RequestState.CLAIMING:
                self._on_offer(entry, outcome)
            case InQueue() if entry.state is RequestState.CLAIMING:
                entry.deadline_s = self._clock() + self._config.request_timeout_s
            case Refused() if entry.state in _OPEN:
                self._fall_back(entry, outcome.stage, outcome.reason)
            case Refused() if isinstance(entry.offer, Invited):
                # Its blocks are reserved for a push that will not come, or cannot be confirmed.
                if entry.state is RequestState.RECEIVING:
                    self._cancels[entry.request_id] = f"{outcome.stage}: {outcome.reason}"

    def _on_offer(self, entry: ConsumerRequest, offer: Granted | Invited) -> None:
        for worker in offer.workers:
            if not is_allowed_peer(worker.host, self._config.allowed_peers):
                reason = f"its worker {worker.host} is not in allowed_peers"
                self._drop(entry)
                self._fall_back(entry, _stage(entry), reason)
                return
        if isinstance(offer, Granted) and self._lacks_needed_block(entry, offer):
            self._drop(entry)
            self._fall_back(entry, "block map", "P's sliding window has left a block needed here")
            return
        entry.offer = offer
        entry.state = RequestState.MATCHED

    def _lacks_needed_block(self, entry: ConsumerRequest, granted: Granted) -> bool:
        """Whether P has dropped a block that the prompt's last token reads.

        P's window stands behind its last computed token, D's one or more tokens before it. Where a
        block ends between the two, about once in ``block_size`` prompts, D prefills.
        """
        num_tokens = entry.ticket.num_tokens
        return any(
            NULL_BLOCK in block_ids[group.first_block_needed(num_tokens) :]
            for group, block_ids in zip(self._groups, granted.block_ids, strict=False)
        )

    def _fall_back(self, entry: ConsumerRequest, stage: str, reason: str) -> None:
        entry.state = RequestState.LOCAL
        self._by_claim.pop(entry.claim_id, None)
        self._stats.count_failure(stage)
        logger.warning(
            "request %s: prefilled locally, %s with prefill server %s:%d failed: %s",
            entry.request_id,
            stage,
            entry.ticket.host,
            entry.ticket.port,
            reason,
        )

    def _give_up_claim(self, entry: ConsumerRequest) -> None:
        entry.state = RequestState.LOCAL
        self._by_claim.pop(entry.claim_id, None)
        self._drop(entry)

    def _drop(self, entry: ConsumerRequest) -> None:
        deadline_s = self._clock() + self._config.first_contact_timeout_s
        self._control.drop(entry.claim_id, entry.ticket, deadline_s)

    def _pull_job(
        self,
        entry: ConsumerRequest,
        granted: Granted,
        block_ids: Sequence[Sequence[int]],
        end: int,
    ) -> PullJob:
        """The workers' order for the tokens from D's local hit to ``end``.

        Without groups when the tables do not fit, which the workers report as failed.
        """
        start = entry.num_local_tokens
        groups: list[GroupBlocks] = []
        try:
            groups = map_blocks(
                granted.block_ids,
                block_ids,
                self._block_sizes,
                start,
                end,
            )
        except TransferError as error:
            logger.error("request %s: %s", entry.request_id, error)
        return PullJob(
            request_id=entry.request_id,
            transfer_id=entry.ticket.transfer_id,
            claim_id=entry.claim_id,
            production=granted.production,
            secret=granted.secret,
            control_address=entry.ticket.address,
            session=granted.session,
            workers=granted.workers,
            groups=groups,
            loaded_blocks=self._loaded_blocks(block_ids, start, end),
            timeout_s=self._config.request_timeout_s,
        )

    def _receive_job(
        self,
        entry: ConsumerRequest,
        invited: Invited,
        block_ids: Sequence[Sequence[int]],
        end: int,
    ) -> ReceiveJob:
        """As ``_pull_job``, for blocks that P will push."""
        start = entry.num_local_tokens
        groups: list[WantedBlocks] = []
        try:
            groups = wanted_blocks(block_ids, self._block_sizes, start, end)
        except TransferError as error:
            logger.error("request %s: %s", entry.request_id, error)
        return ReceiveJob(
            request_id=entry.request_id,
            transfer_id=entry.ticket.transfer_id,
            claim_id=entry.claim_id,
            control_address=entry.ticket.address,
            session=invited.session,
            workers=invited.workers,
            groups=groups,
            loaded_blocks=self._loaded_blocks(block_ids, start, end),
            timeout_s=self._config.request_timeout_s,
        )

    def _loaded_blocks(self, block_ids: Sequence[Sequence[int]], start: int, end: int) -> list[int]:
        if len(block_ids) != 1:
            return []
        size = self._block_sizes[0]
        return list(block_ids[0][start // size : -(-end // size)])


def _stage(entry: ConsumerRequest) -> str:
    return "announce" if isinstance(entry.ticket, Appointment) else "claim"
