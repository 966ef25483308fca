"""A real P scheduler side and a real session of D, on a network that loses, doubles and reorders.

``Prompt`` is a request at P with its blocks, ``Wish`` one at D with all that it was told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fakes.builders import make_appointment, make_fingerprint
from fakes.clock import FakeClock
from fakes.prefiller import PREFILL, PROMPT, Prefiller, make_output
from fakes.requests import make_request
from vllm_llmdd_connector.control.messages import Message, Release, ReleaseAck, decode, encode
from vllm_llmdd_connector.control.session import (
    ClientSession,
    Granted,
    InQueue,
    Invited,
    Outcome,
    Reaction,
    Refused,
)
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.params import AnyTicket, read_ticket, request_prompt_hash
from vllm_llmdd_connector.scheduler.lease import Lease

ADDRESS = ("127.0.0.1", 4000)
NUM_RANKS = 2
OTHER_PROMPT = [7, *PROMPT]
LEASE_S, MAX_LEASE_S = 10.0, 35.0


@dataclass
class Prompt:
    """One request at P; ``blocks`` are those that vLLM has given it at the moment."""

    request: Any
    transfer_id: str
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    has_run: bool = False


@dataclass
class Wish:
    """One request at D."""

    claim_id: int
    ticket: AnyTicket
    deadline_s: float
    outcomes: list[Outcome] = field(default_factory=list)
    is_closed: bool = False
    """D has dropped or finished it."""

    def has(self, *kinds: type[Outcome]) -> bool:
        return any(isinstance(outcome, kinds) for outcome in self.outcomes)


class LossyMeeting:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.p = Prefiller(
            self.clock,
            num_ranks=NUM_RANKS,
            lease_s=LEASE_S,
            max_lease_s=MAX_LEASE_S,
            first_contact_timeout_s=4.0,
            max_leased_fraction=0.1,
            unreserved_fraction=0.04,
        )
        self.p.producer.allow_push()
        self.prompts: dict[str, Prompt] = {}
        self.tickets: list[AnyTicket] = []
        self.productions: dict[str, set[int]] = {}
        """By transfer id: what D's ranks may have been sent."""
        self.leases: dict[int, Lease] = {}
        self.session = self._new_session()
        self.wishes: dict[int, Wish] = {}
        self.to_p: list[bytes] = []
        self.to_d: list[bytes] = []
        """Everything that was sent: it may come again."""
        self._num_at_p = self._num_at_d = 0
        self._confirmed: list[Message] = []
        self._num_requests = 0

    @staticmethod
    def _new_session() -> ClientSession:
        return ClientSession(ADDRESS, make_fingerprint(), takes_push=True, deadlines=Deadlines())

    # P.

    def request_comes(self, transfer_id: str) -> None:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        request = make_request(request_id, PROMPT, {**PREFILL, "transfer_id": transfer_id})
        self.p.producer.on_new_request(request)
        self.prompts[request_id] = Prompt(request, transfer_id)

    def schedule(self, prompt: Prompt, num_tokens: int) -> None:
        """vLLM computes some tokens of the prompt, and allocates its blocks before the first."""
        request_id = prompt.request.request_id
        new: list[list[int]] | None = None
        if not prompt.blocks:
            if self.p.producer.must_wait(prompt.request):
                return
            free = [block.block_id for block in self.p.pool.blocks[1:] if not block.ref_cnt]
            prompt.blocks = free[:3]
            self.p.pool.allocate(prompt.blocks)
            new = [list(prompt.blocks)]
        start, prompt.num_computed = prompt.num_computed, prompt.num_computed + num_tokens
        scheduled = {request_id: num_tokens}
        if prompt.has_run:
            self.hook(make_output(cached={request_id: (new, start)}, num_scheduled=scheduled))
        else:
            assert new is not None
            prompt.has_run = True
            self.hook(make_output(new={request_id: (new, start)}, num_scheduled=scheduled))

    def preempt(self, prompt: Prompt) -> None:
        self.p.pool.end_request(prompt.blocks)
        prompt.blocks, prompt.num_computed = [], 0
        self.hook(make_output(preempted={prompt.request.request_id}))

    def end(self, prompt: Prompt, status: str) -> None:
        """vLLM ends the request, and frees its own references."""
        prompt.request.status.name = status
        params = self.p.producer.request_finished(prompt.request, [prompt.blocks])
        self.p.pool.end_request(prompt.blocks)
        del self.prompts[prompt.request.request_id]
        if params is not None:
            self.tickets.append(read_ticket(params))

    def hook(self, output: Any = None) -> None:
        """A step of vLLM: after it no ended lease holds a block."""
        step: StepMessage = self.p.message(output)
        for chunk in step.chunks:
            self.productions.setdefault(chunk.transfer_id, set()).add(chunk.production)
        for lease in self.live_leases():
            assert lease.deadline_s > self.clock(), "a lease outlives its deadline"

    def live_leases(self) -> list[Lease]:
        """Those whose blocks P holds; each is remembered."""
        live = list(self.p.producer.leases._leases.values())
        self.leases.update((lease.production, lease) for lease in live)
        return live

    def waiting_claims(self) -> set[int]:
        """Of D requests that P still counts with."""
        producer = self.p.producer
        return {*producer.handovers._by_claim, *producer.leases._claims}

    # D.

    def announce(self, transfer_id: str, fits: bool, limit_s: float) -> None:
        prompt = PROMPT if fits else OTHER_PROMPT
        request = make_request("d", prompt)
        ticket = make_appointment(
            prompt, transfer_id=transfer_id, prompt_hash=request_prompt_hash(request)
        )
        self.wish(ticket, limit_s)

    def wish(self, ticket: AnyTicket, limit_s: float) -> None:
        if self.session.is_over:
            self.session = self._new_session()
        now_s = self.clock()
        wish = Wish(len(self.wishes) + 1, ticket, now_s + limit_s)
        self.wishes[wish.claim_id] = wish
        self.react(self.session.claim(wish.claim_id, ticket, wish.deadline_s, now_s))

    def reserve(self, wish: Wish) -> None:
        self.react(self.session.has_blocks(wish.claim_id, self.clock()))

    def cancel(self, wish: Wish) -> None:
        wish.is_closed = True
        now_s = self.clock()
        self.react(self.session.drop(wish.claim_id, wish.ticket, now_s + 5.0, now_s))

    def rank_is_done(self, wish: Wish, rank: int, production: int) -> None:
        """A rank tells P on a connection of its own."""
        release = Release(
            session=self.p.welcome.session,
            claim_id=wish.claim_id,
            rank=rank,
            production=production,
            secret=self._secret(wish),
        )
        self.to_p.append(encode(release))

    def finish(self, wish: Wish) -> None:
        wish.is_closed = True
        self.session.finish(wish.claim_id)

    def may_have_read(self, wish: Wish) -> list[int]:
        """The productions that a rank may have read, or been sent, for this request."""
        granted = [o.production for o in wish.outcomes if isinstance(o, Granted)]
        if granted or not wish.has(Invited):
            return granted
        return sorted(self.productions.get(wish.ticket.transfer_id, ()))

    @staticmethod
    def _secret(wish: Wish) -> str:
        for outcome in wish.outcomes:
            if isinstance(outcome, Granted):
                return outcome.secret
        return wish.ticket.transfer_id

    def lose_connection(self) -> None:
        if not self.session.is_over:
            self.react(self.session.on_lost("lost"))

    def react(self, reaction: Reaction) -> None:
        self.to_p.extend(encode(message) for message in reaction.send)
        for outcome in reaction.outcomes:
            self._hear(self.wishes[outcome.claim_id], outcome)

    @staticmethod
    def _hear(wish: Wish, outcome: Outcome) -> None:
        assert not wish.is_closed, "an ended claim has news"
        assert not wish.has(Refused), "a claim ended twice"
        assert not (wish.has(Granted) and isinstance(outcome, Granted | InQueue | Invited)), (
            "a granted claim was offered something else"
        )
        wish.outcomes.append(outcome)

    # The network, and time.

    def lose_mail(self) -> None:
        self.to_p.clear()
        self.to_d.clear()
        self._num_at_p = self._num_at_d = 0

    def has_news(self) -> bool:
        return (self._num_at_p, self._num_at_d) != (len(self.to_p), len(self.to_d))

    def deliver_news(self) -> None:
        """All that was sent since the last time, in order."""
        for frame in self.to_p[self._num_at_p :]:
            self._num_at_p += 1
            self.p_receives(frame)
        for frame in self.to_d[self._num_at_d :]:
            self._num_at_d += 1
            self.d_receives(frame)

    def p_receives(self, frame: bytes) -> None:
        asked = decode(frame)
        self.p.say(asked, _Sender(lambda answer: self._to_d(answer, asked)))

    def _to_d(self, message: Message, asked: Message) -> None:
        if not isinstance(message, ReleaseAck):
            self.to_d.append(encode(message))
        elif message.valid and asked not in self._confirmed:
            # Asked again, P may repeat its word when the blocks have been freed since.
            self._confirmed.append(asked)
            lease = self.leases.get(message.production)
            assert lease is not None, "P confirmed what it never held"
            held = self.p.pool.ref_counts(lease.held_blocks)
            assert all(held), "P confirmed blocks that it had given back"

    def d_receives(self, frame: bytes) -> None:
        if not self.session.is_over:
            self.react(self.session.on_message(decode(frame), self.clock()))

    def time_passes(self, seconds: float) -> None:
        """D's owner sleeps until the session's next event, rounded up to milliseconds."""
        end_s = self.clock() + seconds
        while not self.session.is_over:
            next_s = self.session.next_event_s()
            if next_s is None or next_s > end_s:
                break
            self.clock.now_s = max(self.clock(), next_s) + 0.001
            self.react(self.session.tick(self.clock()))
        self.clock.now_s = max(self.clock(), end_s)


class _Sender(list[Message]):
    """Answers go out when they are given, some of them long after the question."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    def append(self, message: Message) -> None:
        self._send(message)
