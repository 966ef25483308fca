"""P's rendezvous: prefills that D was told of in advance, by transfer id.

Either leg may come first. Pure state; ``Producer`` guards it, because the scheduling thread brings
P's requests and the control thread D's announcements.

No circular wait: a prompt for which no D has blocks yet is computed only while such prompts take
at most ``unreserved_fraction`` of P's cache (or there is no other). One for which a D has blocks is
always computed, and frees D's and P's blocks by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from vllm_llmdd_connector.control.messages import (
    NOT_HELD,
    Admitted,
    Announce,
    Gone,
    Message,
    Queued,
)
from vllm_llmdd_connector.deadlines import SWEEP_S
from vllm_llmdd_connector.scheduler.lease import Lease
from vllm_llmdd_connector.states import Transitions, next_state

MAX_HANDOVERS = 8192
"""Announcements beyond are not answered; D's deadline for the first answer ends its wait."""
MAX_SUITORS = 64
"""D requests per transfer id; children of one request, and a proxy's repetitions."""

Reply = Callable[[Message], None]


class HandoverState(Enum):
    AWAITED = "awaited"
    QUEUED = "queued"
    ADMITTED = "admitted"
    COMPUTED = "computed"
    ENDED = "ended"


class HandoverEvent(Enum):
    REQUESTED = "P's request comes"
    FORSAKEN = "every D has dropped it or fallen silent"
    ADMITTED = "P may compute it"
    FINISHED = "all computed, P's request has ended, its blocks are held"
    GIVEN_UP = "aborted, computed plainly, not held, or its lease has ended"


HANDOVER: Transitions[HandoverState, HandoverEvent] = {
    HandoverState.AWAITED: {
        HandoverEvent.REQUESTED: HandoverState.QUEUED,
        HandoverEvent.FORSAKEN: HandoverState.ENDED,
    },
    HandoverState.QUEUED: {
        HandoverEvent.ADMITTED: HandoverState.ADMITTED,
        # vLLM may compute what it was told to hold back: it ignores that for prompt_logprobs.
        HandoverEvent.FINISHED: HandoverState.COMPUTED,
        HandoverEvent.GIVEN_UP: HandoverState.ENDED,
    },
    HandoverState.ADMITTED: {
        HandoverEvent.FINISHED: HandoverState.COMPUTED,
        HandoverEvent.GIVEN_UP: HandoverState.ENDED,
    },
    HandoverState.COMPUTED: {
        HandoverEvent.GIVEN_UP: HandoverState.ENDED,
    },
}


class Gate(Enum):
    """What vLLM's scheduler is to do with a prompt that D was told of."""

    GO = "go"
    WAIT = "wait"
    PLAIN = "plain"
    """Compute it without holding anything for a D."""


@dataclass(slots=True)
class Suitor:
    """One D request that waits for a prefill."""

    claim_id: int
    num_tokens: int
    prompt_hash: str
    takes_push: bool
    has_blocks: bool
    deadline_s: float
    reply: Reply
    is_called: bool = False
    """It has been told that P is about to compute."""
    ranks_released: set[int] = field(default_factory=set)
    """D's ranks that had all they want before P had a lease: the last chunk may add nothing."""


@dataclass(slots=True)
class Handover:
    """One transfer id."""

    transfer_id: str
    state: HandoverState
    arrived_s: float
    request_id: str = ""
    num_tokens: int = 0
    prompt_hash: str = ""
    num_blocks: int = 0
    """What P needs for the prompt, over all KV cache groups."""
    suitors: dict[int, Suitor] = field(default_factory=dict)
    was_dropped: bool = False
    """A D has said that it needs nothing of it, and no other has asked."""
    lease: Lease | None = None

    @property
    def is_reserved(self) -> bool:
        """Whether some D takes it as soon as it is computed."""
        return any(suitor.has_blocks for suitor in self.suitors.values())

    def on(self, event: HandoverEvent) -> None:
        self.state = next_state(HANDOVER, self.state, event)

    def keep_releases(self) -> None:
        """The lease is void: D's ranks that were done with it want nothing of the next one."""
        for claim_id, claim in self.lease.claims.items() if self.lease is not None else ():
            suitor = self.suitors.get(claim_id)
            if suitor is not None:
                suitor.ranks_released |= claim.ranks_released


class HandoverTable:
    """All handovers of one P engine."""

    def __init__(
        self, lease_s: float, contact_timeout_s: float, max_unreserved_blocks: int
    ) -> None:
        self.can_push = False
        """Set once the workers have said so."""
        self._lease_s = lease_s
        self._contact_timeout_s = contact_timeout_s
        self._max_unreserved_blocks = max_unreserved_blocks
        self._by_transfer: dict[str, Handover] = {}
        self._by_request: dict[str, Handover] = {}
        self._by_claim: dict[int, Handover] = {}
        self._admitted: dict[str, Handover] = {}
        self._over: dict[int, str] = {}
        """The last claims that have ended, the oldest first, and what D was told; nothing if it has
        everything or has given them up itself."""
        self._sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._by_transfer)

    def of_request(self, request_id: str) -> Handover | None:
        return self._by_request.get(request_id)

    def announce(self, message: Announce, reply: Reply, now_s: float) -> Handover | None:
        """A D waits for this transfer. Returns its handover, or None if D is not taken on."""
        told = self._over.get(message.claim_id)
        if told is not None:
            # D repeats what is not answered in time, and its workers' releases can overtake it.
            if told:
                reply(Gone(claim_id=message.claim_id, reason=told))
            return None
        handover = self._by_transfer.get(message.transfer_id)
        if self._by_claim.get(message.claim_id, handover) is not handover:
            return None
        if handover is not None and handover.lease is not None and handover.lease.end is not None:
            # The next step gives its blocks back, and the workers forget it.
            reply(Gone(claim_id=message.claim_id, reason=NOT_HELD))
            return None
        if handover is None:
            self.sweep(now_s)
            if len(self._by_transfer) >= MAX_HANDOVERS:
                return None
            handover = Handover(message.transfer_id, HandoverState.AWAITED, now_s)
            self._by_transfer[message.transfer_id] = handover
        suitor = handover.suitors.get(message.claim_id)
        if suitor is None:
            if len(handover.suitors) >= MAX_SUITORS:
                return None
            suitor = self._add_suitor(handover, message, reply, now_s)
        suitor.has_blocks |= message.has_blocks
        suitor.deadline_s = now_s + self._lease_s
        suitor.reply = reply
        self._answer(handover, suitor)
        return handover

    def arrive(
        self, transfer_id: str, request_id: str, num_tokens: int, prompt_hash: str, now_s: float
    ) -> Handover | None:
        """P's request has come; None when another one has this transfer id already."""
        handover = self._by_transfer.get(transfer_id)
        if handover is None:
            handover = Handover(transfer_id, HandoverState.AWAITED, now_s)
            self._by_transfer[transfer_id] = handover
        elif handover.state is not HandoverState.AWAITED:
            return None
        handover.on(HandoverEvent.REQUESTED)
        handover.arrived_s = now_s
        handover.request_id = request_id
        handover.num_tokens = num_tokens
        handover.prompt_hash = prompt_hash
        self._by_request[request_id] = handover
        for suitor in list(handover.suitors.values()):
            self._answer(handover, suitor)
        return handover

    def gate(self, handover: Handover, num_blocks: int, now_s: float) -> Gate:
        """Whether P may compute the prompt now; asked again and again while it is not scheduled."""
        if handover.state is not HandoverState.QUEUED:
            return Gate.GO
        handover.num_blocks = num_blocks
        if not self.can_push or self._is_awaited(handover):
            self._admit(handover)
            return Gate.GO
        unreserved = self._num_unreserved_blocks()
        if not unreserved or unreserved + num_blocks <= self._max_unreserved_blocks:
            self._admit(handover)
            return Gate.GO
        if not handover.suitors and now_s - handover.arrived_s >= self._contact_timeout_s:
            return Gate.PLAIN
        # D is called already: P computes as soon as it has blocks.
        self._call(handover)
        return Gate.WAIT

    def is_bounded(self, handover: Handover) -> bool:
        """Whether a D counts on the lease, so that it is not refused: one that has blocks, or was
        told to allocate them. The gate has bounded what such prompts hold."""
        suitors = handover.suitors.values()
        gated = self.can_push and bool(suitors) and all(s.takes_push for s in suitors)
        return gated or handover.is_reserved

    def computed(self, handover: Handover, lease: Lease) -> list[Suitor]:
        """P's request has finished and its blocks are held. Returns who is to be granted them."""
        handover.on(HandoverEvent.FINISHED)
        handover.lease = lease
        return [s for s in handover.suitors.values() if not self._is_pushed(s)]

    def renew(self, claim_id: int, now_s: float) -> bool:
        """Whether there is such a claim."""
        handover = self._by_claim.get(claim_id)
        if handover is None:
            return False
        handover.suitors[claim_id].deadline_s = now_s + self._lease_s
        return True

    def release(
        self, transfer_id: str, claim_id: int, rank: int, num_ranks: int
    ) -> Handover | None:
        """A rank of D has all blocks that it wants, of a lease or without one; None if P knows of
        no such computation."""
        handover = self._by_transfer.get(transfer_id)
        if handover is None or handover.state not in (
            HandoverState.ADMITTED,
            HandoverState.COMPUTED,
        ):
            return None
        suitor = handover.suitors.get(claim_id)
        if suitor is not None and handover.lease is None:
            suitor.ranks_released.add(rank)
            if len(suitor.ranks_released) >= num_ranks:
                self.drop(transfer_id, claim_id)
        return handover

    def drop(self, transfer_id: str, claim_id: int) -> Handover | None:
        """A D needs nothing (more) of a transfer, whether it had announced it or not."""
        handover = self._by_transfer.get(transfer_id)
        if handover is None:
            return None
        if handover.suitors.pop(claim_id, None) is not None:
            self._forget_claim(claim_id, "")
        handover.was_dropped = not handover.suitors
        if handover.was_dropped and handover.state is HandoverState.AWAITED:
            self._end(handover, HandoverEvent.FORSAKEN, "")
        return handover

    def end(self, handover: Handover, reason: str) -> None:
        """Nothing will come of it (any more); whoever still waits is told the reason."""
        self._end(handover, HandoverEvent.GIVEN_UP, reason)

    def _end(self, handover: Handover, event: HandoverEvent, reason: str) -> None:
        handover.on(event)
        self._by_transfer.pop(handover.transfer_id, None)
        self._by_request.pop(handover.request_id, None)
        self._admitted.pop(handover.request_id, None)
        for suitor in handover.suitors.values():
            self._forget_claim(suitor.claim_id, reason)
            if reason:
                suitor.reply(Gone(claim_id=suitor.claim_id, reason=reason))
        handover.suitors.clear()

    def _forget_claim(self, claim_id: int, told: str) -> None:
        self._by_claim.pop(claim_id, None)
        self._over[claim_id] = told
        if len(self._over) > MAX_HANDOVERS:
            del self._over[next(iter(self._over))]

    def sweep(self, now_s: float) -> None:
        """Forget D's that have fallen silent; every ``SWEEP_S`` at most."""
        if now_s < self._sweep_s:
            return
        self._sweep_s = now_s + SWEEP_S
        for handover in list(self._by_transfer.values()):
            for suitor in list(handover.suitors.values()):
                # A lease has deadlines of its own.
                if suitor.deadline_s <= now_s and handover.lease is None:
                    self.drop(handover.transfer_id, suitor.claim_id)

    def _add_suitor(
        self, handover: Handover, message: Announce, reply: Reply, now_s: float
    ) -> Suitor:
        suitor = Suitor(
            message.claim_id,
            message.num_tokens,
            message.prompt_hash,
            message.takes_push,
            message.has_blocks,
            now_s + self._lease_s,
            reply,
        )
        handover.suitors[message.claim_id] = suitor
        handover.was_dropped = False
        self._by_claim[message.claim_id] = handover
        return suitor

    def _answer(self, handover: Handover, suitor: Suitor) -> None:
        if handover.state is HandoverState.AWAITED:
            return
        if (suitor.num_tokens, suitor.prompt_hash) != (handover.num_tokens, handover.prompt_hash):
            reason = (
                f"the prompt differs: {handover.num_tokens} tokens at the prefill server, "
                f"{suitor.num_tokens} here (one of several prompts or choices of a request?)"
            )
            suitor.reply(Gone(claim_id=suitor.claim_id, reason=reason))
            del handover.suitors[suitor.claim_id]
            self._forget_claim(suitor.claim_id, reason)
        elif self._is_pushed(suitor) and (
            suitor.is_called or handover.state is not HandoverState.QUEUED
        ):
            suitor.is_called = True
            suitor.reply(Admitted(claim_id=suitor.claim_id))
        elif handover.state is not HandoverState.COMPUTED:
            suitor.reply(Queued(claim_id=suitor.claim_id))

    def _is_awaited(self, handover: Handover) -> bool:
        """Whether its blocks leave without waiting for room at a D that waits for us."""
        return handover.is_reserved or any(not s.takes_push for s in handover.suitors.values())

    def _is_pushed(self, suitor: Suitor) -> bool:
        return self.can_push and suitor.takes_push

    def _admit(self, handover: Handover) -> None:
        handover.on(HandoverEvent.ADMITTED)
        self._admitted[handover.request_id] = handover
        self._call(handover)

    def _call(self, handover: Handover) -> None:
        for suitor in handover.suitors.values():
            if self._is_pushed(suitor) and not suitor.is_called:
                suitor.is_called = True
                suitor.reply(Admitted(claim_id=suitor.claim_id))

    def _num_unreserved_blocks(self) -> int:
        return sum(
            handover.num_blocks
            for handover in self._admitted.values()
            if not self._is_awaited(handover)
        )
