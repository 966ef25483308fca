"""D's side of a conversation with one P engine, as a state machine without sockets or clock.

The owner feeds it what was asked locally and what arrived, sends the messages it returns, and
passes the time. What became of each claim is returned as ``Outcome`` values. A session in a final
state is discarded by the owner, who may open a new one.
"""

import math
from dataclasses import dataclass, field

from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.control.messages import (
    MAX_RENEWED_CLAIMS,
    PROTOCOL_VERSION,
    Admitted,
    Announce,
    AnyMessage,
    Claim,
    Drop,
    Gone,
    Grant,
    Hello,
    Message,
    Queued,
    Reject,
    Renew,
    Unknown,
    Welcome,
    WorkerEndpoint,
    raw_fingerprint,
)
from vllm_llmdd_connector.control.session_state import SESSION, SessionEvent, SessionState
from vllm_llmdd_connector.deadlines import RESEND_S, Deadlines
from vllm_llmdd_connector.errors import LocalProtocolError
from vllm_llmdd_connector.log import one_line
from vllm_llmdd_connector.params import AnyTicket, Appointment
from vllm_llmdd_connector.states import next_state
from vllm_llmdd_connector.trace.clock import ClockOffset, estimate


@dataclass(frozen=True, slots=True)
class Granted:
    """P holds the blocks for this claim."""

    claim_id: int
    session: int
    production: int
    secret: str
    block_ids: tuple[tuple[int, ...], ...]
    workers: tuple[WorkerEndpoint, ...]


@dataclass(frozen=True, slots=True)
class InQueue:
    """P has the announced request and will answer when it is about to compute it."""

    claim_id: int


@dataclass(frozen=True, slots=True)
class Invited:
    """P is about to compute the announced request: blocks can be reserved for it."""

    claim_id: int
    session: int
    workers: tuple[WorkerEndpoint, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """There is nothing to fetch for this claim; ``stage`` names where it ended."""

    claim_id: int
    stage: str
    reason: str


Outcome = Granted | InQueue | Invited | Refused

_RESTARTED = "the prefill server was restarted"


@dataclass(slots=True)
class _OpenClaim:
    ticket: AnyTicket
    deadline_s: float
    is_known: bool = False
    """P has answered: it is renewed, not sent again."""
    granted: bool = False
    has_blocks: bool = False
    sent_s: float | None = None


@dataclass(slots=True)
class Reaction:
    """What the owner has to do after an event."""

    send: list[Message] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)


class ClientSession:
    """One D engine's session with the P engine at one address."""

    def __init__(
        self,
        address: tuple[str, int],
        fingerprint: Fingerprint,
        takes_push: bool,
        deadlines: Deadlines,
    ) -> None:
        self.address = address
        self._deadlines = deadlines
        self._takes_push = takes_push
        self.state = SessionState.OPENING
        self.end_reason = ""
        self._num_workers = fingerprint.tensor_parallel_size
        self._fingerprint = raw_fingerprint(fingerprint)
        self._hello_sent_s: float | None = None
        self._renew_s = math.inf
        self._renewed_s = 0.0
        self._session = 0
        self._asks_again = False
        """P has been asked which process it is, because a ticket names another."""
        self.instance = ""
        """P's process start; empty before its first ``Welcome``."""
        self.clock_offset: ClockOffset | None = None
        self._workers: tuple[WorkerEndpoint, ...] = ()
        self._claims: dict[int, _OpenClaim] = {}
        self._pending_drops: dict[int, _OpenClaim] = {}

    @property
    def is_over(self) -> bool:
        """Whether the session is in a final state."""
        return self.state not in SESSION

    @property
    def num_claims(self) -> int:
        return len(self._claims)

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float, now_s: float) -> Reaction:
        """Ask for the blocks of ``ticket``; an outcome comes by ``deadline_s`` at the latest."""
        if self.is_over:
            raise LocalProtocolError(f"session {self.address}: claim in state {self.state.value}")
        self._claims[claim_id] = _OpenClaim(ticket, deadline_s)
        return self._advance(now_s)

    def has_blocks(self, claim_id: int, now_s: float) -> Reaction:
        """D has allocated the blocks of an announced request."""
        claim = self._claims.get(claim_id)
        if claim is None or self.state is not SessionState.READY:
            return Reaction()
        claim.has_blocks = True
        claim.sent_s = now_s
        return Reaction(send=[self._claim_message(claim_id, claim)])

    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float, now_s: float) -> Reaction:
        """Nothing (more) is needed of a claim, whether P has heard of it or not.

        While the session opens it is kept until ``deadline_s``; P's lease ends by itself anyway.
        """
        self._claims.pop(claim_id, None)
        if not self.is_over:
            self._pending_drops[claim_id] = _OpenClaim(ticket, deadline_s)
        return self._advance(now_s)

    def finish(self, claim_id: int) -> None:
        """All ranks have released the claim: stop renewing it."""
        self._claims.pop(claim_id, None)

    def on_message(self, message: AnyMessage, now_s: float) -> Reaction:
        """A message of P. What does not fit the state is ignored: it is late or a duplicate."""
        match message:
            case Welcome() if self.state is SessionState.OPENING:
                return self._on_welcome(message, now_s)
            case Welcome() if self._asks_again:
                return self._on_welcome_again(message, now_s)
            case Reject() if self.state is SessionState.OPENING:
                return self._end(SessionEvent.REFUSED, "handshake", one_line(message.reason))
            case Unknown(session=session) if session == self._session and session:
                return self._merge(self._forget_process(), self._advance(now_s))
            case Grant() if self.state is SessionState.READY:
                return self._on_grant(message)
            case Queued() if self.state is SessionState.READY:
                return self._on_known(message.claim_id, InQueue(message.claim_id))
            case Admitted() if self.state is SessionState.READY:
                invited = Invited(message.claim_id, self._session, self._workers)
                return self._on_known(message.claim_id, invited)
            case Gone():
                return self._refuse([message.claim_id], "claim", one_line(message.reason))
        return Reaction()

    def on_lost(self, reason: str) -> Reaction:
        """The connection is gone or was never made."""
        return self._end(SessionEvent.LOST, "connection", reason)

    def tick(self, now_s: float) -> Reaction:
        """Pass the time: resends, renewals and deadlines."""
        late = [
            claim_id
            for claim_id, claim in self._claims.items()
            if not claim.is_known and claim.deadline_s <= now_s
        ]
        host, port = self.address
        stage = "handshake" if self.state is SessionState.OPENING else "claim"
        limit = self._deadlines.within("first_contact_timeout_s")
        reason = f"no answer from {host}:{port} {limit}"
        if self.state is SessionState.READY:
            # P may still grant what nobody waits for; without a drop its lease had to expire.
            for claim_id in late:
                self._pending_drops[claim_id] = _OpenClaim(
                    self._claims[claim_id].ticket, now_s + RESEND_S
                )
        reaction = self._refuse(late, stage, reason)
        for claim_id, drop in list(self._pending_drops.items()):
            if drop.deadline_s <= now_s:
                del self._pending_drops[claim_id]
        if self.state is SessionState.OPENING and not self._claims and not self._pending_drops:
            self._merge(reaction, self._end(SessionEvent.FORSAKEN, "handshake", reason))
        self._merge(reaction, self._advance(now_s))
        if self.state is SessionState.READY and now_s - self._renewed_s >= self._renew_s:
            self._renewed_s = now_s
            known = tuple(cid for cid, claim in self._claims.items() if claim.is_known)
            for start in range(0, len(known), MAX_RENEWED_CLAIMS):
                part = known[start : start + MAX_RENEWED_CLAIMS]
                reaction.send.append(Renew(session=self._session, claim_ids=part))
        return reaction

    def next_event_s(self) -> float | None:
        """When ``tick`` has something to do; None while nothing is open: an idle owner sleeps."""
        times: list[float] = []
        if any(claim.is_known for claim in self._claims.values()):
            times.append(self._renewed_s + self._renew_s)
        for claim in self._claims.values():
            if not claim.is_known:
                sent_s = claim.sent_s if self.state is SessionState.READY else self._hello_sent_s
                times.append(min(claim.deadline_s, (sent_s or 0.0) + RESEND_S))
        times.extend(drop.deadline_s for drop in self._pending_drops.values())
        return min(times, default=None)

    def _on_welcome(self, message: Welcome, now_s: float) -> Reaction:
        if len(message.workers) != self._num_workers:
            return self._end(
                SessionEvent.REFUSED,
                "handshake",
                f"number of workers differs: local {self._num_workers}, prefill server "
                f"{len(message.workers)}",
            )
        self._on(SessionEvent.WELCOMED)
        self._session = message.session
        self.instance = message.instance
        if message.clock_s is not None and message.hello_sent_s is not None:
            self.clock_offset = estimate(message.hello_sent_s, message.clock_s, now_s)
        self._workers = message.workers
        self._renew_s = self._deadlines.renewal_s(message.lease_s)
        self._renewed_s = now_s
        return self._merge(self._refuse_foreign(), self._advance(now_s))

    def _on_welcome_again(self, message: Welcome, now_s: float) -> Reaction:
        """Either the tickets in doubt are of an earlier process, or P is another one now."""
        self._asks_again = False
        if message.session == self._session:
            return self._refuse_foreign()
        return self._merge(self._forget_process(), self._on_welcome(message, now_s))

    def _forget_process(self) -> Reaction:
        """P was restarted: nothing of the old session exists there any more."""
        known = [claim_id for claim_id, claim in self._claims.items() if claim.is_known]
        self._on(SessionEvent.RESTARTED)
        self._session = 0
        self._asks_again = False
        self._hello_sent_s = None
        for claim in self._claims.values():
            claim.sent_s = None
        return self._refuse(known, "claim", _RESTARTED)

    def _refuse_foreign(self) -> Reaction:
        """P has just said which process it is: tickets of others are worth nothing."""
        claims = self._claims.items()
        foreign = [cid for cid, claim in claims if not self._is_of_this_process(claim.ticket)]
        return self._refuse(foreign, "claim", _RESTARTED)

    def _on_grant(self, message: Grant) -> Reaction:
        claim = self._claims.get(message.claim_id)
        if claim is None or claim.granted:
            return Reaction()
        claim.is_known = claim.granted = True
        granted = Granted(
            message.claim_id,
            self._session,
            message.production,
            message.secret,
            message.block_ids,
            self._workers,
        )
        return Reaction(outcomes=[granted])

    def _on_known(self, claim_id: int, outcome: Outcome) -> Reaction:
        claim = self._claims.get(claim_id)
        if claim is None or claim.granted:
            return Reaction()
        claim.is_known = True
        return Reaction(outcomes=[outcome])

    def _advance(self, now_s: float) -> Reaction:
        """Send whatever is due in this state."""
        reaction = Reaction()
        if self.state is SessionState.OPENING:
            if self._hello_sent_s is None or now_s - self._hello_sent_s >= RESEND_S:
                self._hello_sent_s = now_s
                reaction.send.append(self._hello(now_s))
        elif self.state is SessionState.READY:
            reaction.send.extend(self._take_drops())
            reaction.send.extend(self._due_claims(now_s))
        return reaction

    def _due_claims(self, now_s: float) -> list[Message]:
        """Claims to be sent or repeated; for tickets of another process P is asked who it is.

        To refuse them unasked could be for ever: a machine that loses its power closes no
        connection, and while nothing is sent nobody learns that a new process has its address.
        """
        messages: list[Message] = []
        doubts = []
        for claim_id, claim in self._claims.items():
            if claim.is_known or (claim.sent_s is not None and now_s - claim.sent_s < RESEND_S):
                continue
            claim.sent_s = now_s
            if self._is_of_this_process(claim.ticket):
                messages.append(self._claim_message(claim_id, claim))
            else:
                doubts = [self._hello(now_s)]
        self._asks_again |= bool(doubts)
        return messages + doubts

    def _hello(self, now_s: float) -> Hello:
        return Hello(version=PROTOCOL_VERSION, fingerprint=self._fingerprint, sent_s=now_s)

    def _take_drops(self) -> list[Message]:
        drops, self._pending_drops = self._pending_drops, {}
        return [
            Drop(
                session=self._session,
                claim_id=claim_id,
                production=drop.ticket.production,
                secret=drop.ticket.secret,
            )
            for claim_id, drop in drops.items()
            if self._is_of_this_process(drop.ticket)
        ]

    def _is_of_this_process(self, ticket: AnyTicket) -> bool:
        return isinstance(ticket, Appointment) or ticket.instance == self.instance

    def _claim_message(self, claim_id: int, claim: _OpenClaim) -> Claim | Announce:
        ticket = claim.ticket
        if isinstance(ticket, Appointment):
            return Announce(
                session=self._session,
                claim_id=claim_id,
                transfer_id=ticket.transfer_id,
                num_tokens=ticket.num_tokens,
                prompt_hash=ticket.prompt_hash,
                takes_push=self._takes_push,
                has_blocks=claim.has_blocks,
            )
        return Claim(
            session=self._session,
            claim_id=claim_id,
            production=ticket.production,
            secret=ticket.secret,
            prompt_hash=ticket.prompt_hash,
        )

    def _refuse(self, claim_ids: list[int], stage: str, reason: str) -> Reaction:
        reaction = Reaction()
        for claim_id in claim_ids:
            claim = self._claims.pop(claim_id, None)
            if claim is None:
                continue
            announced = stage == "claim" and isinstance(claim.ticket, Appointment)
            reaction.outcomes.append(Refused(claim_id, "announce" if announced else stage, reason))
        return reaction

    def _end(self, event: SessionEvent, stage: str, reason: str) -> Reaction:
        if self.is_over:
            return Reaction()
        self._on(event)
        self.end_reason = reason
        return self._refuse(list(self._claims), stage, reason)

    def _on(self, event: SessionEvent) -> None:
        self.state = next_state(SESSION, self.state, event)

    @staticmethod
    def _merge(into: Reaction, other: Reaction) -> Reaction:
        into.send.extend(other.send)
        into.outcomes.extend(other.outcomes)
        return into
