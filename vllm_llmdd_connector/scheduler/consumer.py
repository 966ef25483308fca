"""D's requests: from kv_transfer_params to the report that their blocks have arrived.

Runs on the scheduling thread only; ``request_state`` has a request's states.

A grant is for blocks that P has computed, which D pulls; an invitation is for a prompt that P is
about to compute, whose blocks it pushes into those that D reserves.

Only states before ``RECEIVING`` may still ask for remote blocks, so a request that vLLM preempts
after its load, or reschedules after a failure, is computed locally.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from vllm_llmdd_connector.config import ConnectorConfig, is_allowed_peer
from vllm_llmdd_connector.control.session import Granted, InQueue, Invited, Outcome, Refused
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.ids import new_claim_id
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import Job, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import AnyTicket, Appointment, wants_remote_prefill
from vllm_llmdd_connector.scheduler.admission import check_ticket, checked_metaserver, ticket_of
from vllm_llmdd_connector.scheduler.consumer_request import OPEN, UNANSWERED, ConsumerRequest
from vllm_llmdd_connector.scheduler.jobs import JobOrder, pull_job, receive_job
from vllm_llmdd_connector.scheduler.request_state import RequestEvent, RequestState
from vllm_llmdd_connector.scheduler.summons import Answered, Knocked, SummonsTable
from vllm_llmdd_connector.scheduler.turns import Turns

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class Control(Protocol):
    """What the consumer needs of the control plane; ``ControlClient`` and the tests' fake have
    it."""

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None: ...
    def has_blocks(self, claim_id: int, ticket: AnyTicket) -> None: ...
    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None: ...
    def finish(self, claim_id: int, ticket: AnyTicket) -> None: ...
    def take_outcomes(self) -> list[Outcome]: ...


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
        summons: SummonsTable | None = None,
    ) -> None:
        """Without ``summons`` no metaserver is asked."""
        self._config = config
        self._summons = summons
        self._groups = tuple(groups)
        self._block_sizes = tuple(block_sizes)
        self._control = control
        self._clock = clock
        self._stats = stats
        self._requests: dict[str, ConsumerRequest] = {}
        self._by_claim: dict[int, ConsumerRequest] = {}
        self._turns = Turns()
        self._jobs: list[Job] = []
        self._cancels: dict[str, str] = {}

    def on_new_request(self, request: "Request") -> None:
        """Start the claim before vLLM first tries to schedule the request."""
        self._known(request)

    def num_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that P holds beyond D's local hit; None while P or other requests are awaited."""
        entry = self._known(request)
        if entry is None:
            return 0, False
        self._apply_outcomes()
        if entry.is_late(self._clock()):
            self._end_late(entry)
        if entry.state in UNANSWERED:
            return None, False
        if self._turns.must_pass(request.request_id):
            return None, False
        self._turns.on_asked(request.request_id)
        if entry.state is not RequestState.MATCHED:
            return 0, False
        entry.num_local_tokens = num_computed_tokens
        num_tokens = entry.ticket.num_tokens - num_computed_tokens
        # vLLM computes the last token itself in any case, to sample from it. It is not counted as
        # loaded either: vLLM would let a sliding window move past the block that it still reads.
        return (num_tokens - 1, True) if num_tokens > 1 else (0, False)

    def transfer_of(self, request_id: str) -> str | None:
        """The transfer id of a request with a ticket."""
        entry = self._requests.get(request_id)
        return None if entry is None else entry.ticket.transfer_id

    def on_placed(self, request_id: str) -> None:
        """vLLM has all blocks that it needs for the request now."""
        self._turns.on_placed(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether an allocation for this request still decides about its remote blocks."""
        entry = self._requests.get(request_id)
        return entry is not None and entry.state in OPEN

    def on_allocated(
        self, request_id: str, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """vLLM allocated blocks: fetch into them, or tell P that nothing is needed."""
        self.on_placed(request_id)
        entry = self._requests.get(request_id)
        if entry is None or entry.state not in OPEN:
            return
        if num_external_tokens <= 0 or entry.offer is None:
            self._give_up_claim(entry)
            self._stats.count("recv_not_needed")
            return
        order = JobOrder(
            entry.request_id,
            entry.ticket,
            entry.claim_id,
            block_ids,
            self._block_sizes,
            entry.num_local_tokens,
            entry.num_local_tokens + num_external_tokens,
            self._config.request_timeout_s,
        )
        if isinstance(entry.offer, Granted):
            self._jobs.append(pull_job(order, entry.offer))
        else:
            self._jobs.append(receive_job(order, entry.offer))
            self._control.has_blocks(entry.claim_id, entry.ticket)
        entry.on(RequestEvent.ALLOCATED)

    def fill(self, step: StepMessage) -> None:
        """Add this step's jobs and cancels to the step message."""
        if self._by_claim:
            self._apply_outcomes()
            # vLLM asks for no request behind one that waits for blocks.
            now_s = self._clock()
            for entry in [entry for entry in self._by_claim.values() if entry.is_late(now_s)]:
                self._end_late(entry)
        self._turns.end_step()
        step.jobs, self._jobs = self._jobs, []
        step.cancels, self._cancels = self._cancels, {}

    def on_failed(self, failed: dict[str, str]) -> None:
        """Some rank could not load these requests; the ranks' common report may come in a later
        step."""
        for request_id in failed:
            entry = self._requests.get(request_id)
            if entry is not None and entry.state is RequestState.RECEIVING:
                entry.on(RequestEvent.RANK_FAILED)
                self._by_claim.pop(entry.claim_id, None)
                self._drop(entry)
                if isinstance(entry.offer, Invited):
                    # After the drop P sends nothing more, and other ranks may wait for it.
                    self._cancels[request_id] = "another rank failed"

    def on_received(self, request_ids: set[str]) -> None:
        """All ranks have reported these requests."""
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None:
                self._turns.on_arrived(request_id)
            if entry is not None and entry.state is RequestState.RECEIVING:
                entry.on(RequestEvent.RECEIVED)
                self._by_claim.pop(entry.claim_id, None)
                self._control.finish(entry.claim_id, entry.ticket)

    def request_finished(self, request: "Request") -> None:
        """The request is over at D, normally or by an abort at any moment."""
        self._turns.on_placed(request.request_id)
        entry = self._requests.pop(request.request_id, None)
        if entry is None:
            self._release_rejected(request)
            return
        self._by_claim.pop(entry.claim_id, None)
        if entry.state is RequestState.RECEIVING:
            self._cancels[entry.request_id] = ""
        if entry.state in OPEN or entry.state is RequestState.RECEIVING:
            self._drop(entry)
        if self._summons is not None:
            self._summons.end(entry.ticket.transfer_id)

    def _known(self, request: "Request") -> ConsumerRequest | None:
        """The request's entry; made, and its claim sent, at first sight."""
        entry = self._requests.get(request.request_id)
        if entry is None and wants_remote_prefill(request.kv_transfer_params):
            entry = self._admit(request)
        return entry

    def _admit(self, request: "Request") -> ConsumerRequest | None:
        if getattr(request, "abort_immediately", False):
            return None
        params = request.kv_transfer_params
        assert params is not None
        try:
            url = checked_metaserver(params, request, self._config.allowed_peers)
            ticket = ticket_of(params, request)
            check_ticket(ticket, request, self._config.allowed_peers)
        except RemoteProtocolError as error:
            params["do_remote_prefill"] = False
            self._stats.count_failure("params")
            logger.warning("request %s: prefilled locally: %s", request.request_id, error)
            return None
        state = RequestState.CLAIMING if url is None else RequestState.SUMMONING
        entry = ConsumerRequest(request.request_id, ticket, new_claim_id(), state)
        self._requests[entry.request_id] = entry
        self._by_claim[entry.claim_id] = entry
        if url is None:
            self._claim(entry)
        else:
            self._summon(entry, url)
        return entry

    def _claim(self, entry: ConsumerRequest) -> None:
        entry.wait("first_contact_timeout_s", self._config, self._clock())
        self._control.claim(entry.claim_id, entry.ticket, entry.deadline_s)

    def _summon(self, entry: ConsumerRequest, url: str) -> None:
        assert self._summons is not None, "a consumer that knows metaservers"
        entry.wait("metaserver_timeout_s", self._config, self._clock())
        self._summons.ask(entry.request_id, entry.ticket.transfer_id, url)

    def _release_rejected(self, request: "Request") -> None:
        """D's frontend refused the request: it comes only to be aborted, with a placeholder
        prompt."""
        params = request.kv_transfer_params
        if not getattr(request, "abort_immediately", False) or not wants_remote_prefill(params):
            return
        assert params is not None
        try:
            ticket = ticket_of(params, request)
        except RemoteProtocolError:
            return
        if is_allowed_peer(ticket.host, self._config.allowed_peers):
            deadline_s = self._clock() + self._config.first_contact_timeout_s
            self._control.drop(new_claim_id(), ticket, deadline_s)
            self._stats.count("recv_not_needed")

    def _apply_outcomes(self) -> None:
        if self._summons is not None:
            for event in self._summons.take_events():
                self._apply_summons(self._summons, event)
        for outcome in self._control.take_outcomes():
            entry = self._by_claim.get(outcome.claim_id)
            if entry is not None:
                self._apply(entry, outcome)

    def _apply_summons(self, summons: SummonsTable, event: Knocked | Answered) -> None:
        entry = self._requests.get(event.request_id)
        if entry is None:
            return
        match event:
            case Knocked() if entry.state is RequestState.SUMMONING:
                assert isinstance(entry.ticket, Appointment)
                entry.ticket = replace(entry.ticket, host=event.host, port=event.port)
                entry.on(RequestEvent.KNOCKED)
                self._claim(entry)
            case Knocked() if entry.ticket.address != (event.host, event.port):
                # The proxy has sent it to another P after the first one.
                summons.send_away(entry.ticket.transfer_id, event.host, event.port)
            case Answered(failure="") if entry.state is RequestState.SUMMONING:
                # P has finished: what it had to say is here or on its way.
                if self._clock() + self._config.first_contact_timeout_s < entry.deadline_s:
                    entry.wait("first_contact_timeout_s", self._config, self._clock())
            case Answered() if event.failure and entry.state in OPEN:
                self._drop(entry)
                self._fall_back(entry, "metaserver", event.failure)

    def _apply(self, entry: ConsumerRequest, outcome: Outcome) -> None:
        match outcome:
            case Granted() | Invited() if entry.state is RequestState.CLAIMING:
                self._on_offer(entry, outcome)
            case InQueue() if entry.state is RequestState.CLAIMING:
                entry.wait_for_reservation(self._config, self._clock())
            case Refused() if entry.state in OPEN:
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
                self._fall_back(entry, entry.stage, reason)
                return
        if isinstance(offer, Granted) and self._lacks_needed_block(entry, offer):
            self._drop(entry)
            self._fall_back(entry, "block map", "P's sliding window has left a block needed here")
            return
        entry.offer = offer
        if isinstance(offer, Invited):
            entry.wait_for_reservation(self._config, self._clock())
        entry.on(RequestEvent.OFFERED)

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
        entry.on(RequestEvent.REFUSED)
        self._by_claim.pop(entry.claim_id, None)
        if self._summons is not None:
            self._summons.end(entry.ticket.transfer_id)
        self._stats.count_failure(stage)
        logger.warning(
            "request %s: prefilled locally, %s with prefill server %s failed: %s",
            entry.request_id,
            stage,
            "{}:{}".format(*entry.ticket.address) if entry.ticket.port else "(none yet)",
            reason,
        )

    def _give_up_claim(self, entry: ConsumerRequest) -> None:
        entry.on(RequestEvent.NOT_NEEDED)
        self._by_claim.pop(entry.claim_id, None)
        self._drop(entry)

    def _end_late(self, entry: ConsumerRequest) -> None:
        # P's answer may still be on the way, and would be renewed for nobody.
        self._drop(entry)
        self._fall_back(entry, *entry.lateness(self._config))

    def _drop(self, entry: ConsumerRequest) -> None:
        if not entry.ticket.port:
            return
        deadline_s = self._clock() + self._config.first_contact_timeout_s
        self._control.drop(entry.claim_id, entry.ticket, deadline_s)
