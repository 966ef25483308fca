"""P's handovers and leases and D's session against each other, in any order of events."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from contract.examples import FAULT_WANTED, examples
from fakes.lossy_meeting import MAX_LEASE_S, LossyMeeting, Prompt, Wish
from fakes.prefiller import PROMPT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm_llmdd_connector.control.session import (
    ClientSession,
    Invited,
    Reaction,
    Refused,
)
from vllm_llmdd_connector.scheduler.handover import HandoverTable
from vllm_llmdd_connector.scheduler.lease import LeaseTable

TRANSFERS = ["t1", "t2"]
LIMITS_S = st.sampled_from([30.0, 4.0, 1.0])


def has(attribute: str) -> Callable[[Any], bool]:
    return lambda machine: bool(getattr(machine, attribute)())


class Meetings(RuleBasedStateMachine):
    """Each step is one event somewhere; messages are delivered late, twice or never."""

    def __init__(self) -> None:
        super().__init__()
        self.meeting = LossyMeeting()
        self.seen_at_p: set[int] = set()
        self.over_at_p: set[int] = set()

    @initialize(knows_p=st.booleans())
    def session_is_open(self, knows_p: bool) -> None:
        if knows_p:
            self.meeting.announce(TRANSFERS[0], True, 30.0)
            self.all_mail_arrives()

    # Which events are possible.

    def prompts(self) -> list[Prompt]:
        return list(self.meeting.prompts.values())

    def unasked(self) -> list[str]:
        return sorted(set(TRANSFERS) - {prompt.transfer_id for prompt in self.prompts()})

    def unfinished(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts() if prompt.num_computed < len(PROMPT)]

    def computed(self) -> list[Prompt]:
        return [prompt for prompt in self.prompts() if prompt.num_computed == len(PROMPT)]

    def wishes(self) -> list[Wish]:
        """Those that have not ended."""
        wishes = self.meeting.wishes.values()
        return [wish for wish in wishes if not wish.is_closed and not wish.has(Refused)]

    def readers(self) -> list[Wish]:
        return [wish for wish in self.wishes() if self.meeting.may_have_read(wish)]

    def invited(self) -> list[Wish]:
        return [wish for wish in self.wishes() if wish.has(Invited)]

    def tickets(self) -> list[Any]:
        return self.meeting.tickets[-3:]

    def mail(self) -> list[bytes]:
        return [*self.meeting.to_p, *self.meeting.to_d]

    # P.

    @precondition(has("unasked"))
    @rule(data=st.data())
    def p_s_request_comes(self, data: st.DataObject) -> None:
        self.meeting.request_comes(data.draw(st.sampled_from(self.unasked())))

    @precondition(has("unfinished"))
    @rule(data=st.data(), num_tokens=st.sampled_from([len(PROMPT), 16]))
    def p_computes(self, data: st.DataObject, num_tokens: int) -> None:
        prompt = data.draw(st.sampled_from(self.unfinished()))
        self.meeting.schedule(prompt, min(num_tokens, len(PROMPT) - prompt.num_computed))

    @precondition(has("computed"))
    @rule(data=st.data())
    def p_s_request_is_done(self, data: st.DataObject) -> None:
        self.meeting.end(data.draw(st.sampled_from(self.computed())), "FINISHED_STOPPED")

    # D.

    @precondition(lambda self: len(self.wishes()) < 4)
    @rule(
        transfer_id=st.sampled_from(TRANSFERS),
        fits=st.sampled_from([True, True, True, False]),
        limit_s=LIMITS_S,
    )
    def d_announces(self, transfer_id: str, fits: bool, limit_s: float) -> None:
        self.meeting.announce(transfer_id, fits, limit_s)

    @precondition(has("tickets"))
    @rule(data=st.data(), limit_s=LIMITS_S)
    def d_claims(self, data: st.DataObject, limit_s: float) -> None:
        self.meeting.wish(data.draw(st.sampled_from(self.tickets())), limit_s)

    @precondition(has("invited"))
    @rule(data=st.data())
    def d_reserves(self, data: st.DataObject) -> None:
        self.meeting.reserve(data.draw(st.sampled_from(self.invited())))

    @precondition(has("readers"))
    @rule(data=st.data(), ranks=st.sampled_from([[0], [1], [1, 0], [0, 1, 1]]))
    def ranks_of_d_are_done(self, data: st.DataObject, ranks: list[int]) -> None:
        """When all are, D renews the claim no longer."""
        wish = data.draw(st.sampled_from(self.readers()))
        production = data.draw(st.sampled_from(self.meeting.may_have_read(wish)))
        for rank in ranks:
            self.meeting.rank_is_done(wish, rank, production)
        if len(ranks) > 1:
            self.meeting.finish(wish)

    # Between them.

    @precondition(has("mail"))
    @rule(data=st.data())
    def one_message_arrives(self, data: st.DataObject) -> None:
        """The same one may be drawn again, and others never."""
        frame = data.draw(st.sampled_from(self.mail()))
        if frame in self.meeting.to_p:
            self.meeting.p_receives(frame)
        else:
            self.meeting.d_receives(frame)

    @precondition(has("mail"))
    @rule()
    def all_mail_arrives(self) -> None:
        """In order, until nobody says anything more."""
        while self.meeting.has_news():
            self.meeting.deliver_news()

    @rule(seconds=st.sampled_from([0.3, 1.5, 5.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.meeting.time_passes(seconds)
        self.meeting.hook()

    @rule(data=st.data())
    def accident(self, data: st.DataObject) -> None:
        """One rule, so that what goes right has more of the steps."""
        meeting = self.meeting
        accidents: list[Callable[[], None]] = [meeting.lose_mail, meeting.lose_connection]
        for prompt in self.prompts():
            accidents.append(partial(meeting.end, prompt, "FINISHED_ABORTED"))
            if prompt.blocks:
                accidents.append(partial(meeting.preempt, prompt))
        accidents.extend(partial(meeting.cancel, wish) for wish in self.wishes())
        data.draw(st.sampled_from(accidents))()

    # What always holds. ``LossyMeeting`` checks what D hears and what P confirms.

    @invariant()
    def every_wish_has_an_answer_by_its_deadline(self) -> None:
        for wish in self.wishes():
            assert wish.outcomes or wish.deadline_s >= self.meeting.clock() - 0.001

    @invariant()
    def ended_claim_stays_ended_at_p(self) -> None:
        waiting = self.meeting.waiting_claims()
        self.over_at_p |= self.seen_at_p - waiting
        assert not waiting & self.over_at_p, "P counts with an ended claim again"
        self.seen_at_p |= waiting

    @invariant()
    def every_block_is_held_once_by_each_who_holds_it(self) -> None:
        pool = self.meeting.p.pool
        expected = [0] * len(pool.blocks)
        for prompt in self.prompts():
            for block in prompt.blocks:
                expected[block] += 1
        for lease in self.meeting.live_leases():
            for block in lease.held_blocks:
                expected[block] += 1
        assert pool.ref_counts(range(len(expected))) == expected

    def teardown(self) -> None:
        """D and the network die; P's requests end, and then nothing is left."""
        meeting = self.meeting
        for prompt in self.prompts():
            meeting.end(prompt, "FINISHED_ABORTED")
        for wish in self.wishes():
            meeting.cancel(wish)
        meeting.time_passes(MAX_LEASE_S)
        meeting.hook()
        meeting.hook()
        producer = meeting.p.producer
        assert (len(producer.leases), len(producer.handovers)) == (0, 0)
        assert (meeting.waiting_claims(), meeting.p.pool.in_use) == (set(), [])
        assert meeting.session.is_over or meeting.session.num_claims == 0


TestMeetings = Meetings.TestCase
TestMeetings.settings = settings(examples(150), stateful_step_count=50)


def forgets_nothing_of_ended_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """P does not remember which claims are over."""

    def forget(table: HandoverTable, claim_id: int, told: str) -> None:
        table._by_claim.pop(claim_id, None)

    monkeypatch.setattr(HandoverTable, "_forget_claim", forget)


def never_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "_expire", lambda table, lease: None)


def answers_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """D's session keeps a claim that P has refused."""
    refuse = ClientSession._refuse

    def keep(session: ClientSession, claim_ids: list[int], *words: str) -> Reaction:
        kept = {claim_id: session._claims.get(claim_id) for claim_id in claim_ids}
        reaction = refuse(session, claim_ids, *words)
        session._claims.update((key, claim) for key, claim in kept.items() if claim is not None)
        return reaction

    monkeypatch.setattr(ClientSession, "_refuse", keep)


def leaks_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """P forgets a preempted prompt's lease without giving its blocks back."""

    def void(table: LeaseTable, lease: Any) -> None:
        table.forget(lease)

    monkeypatch.setattr(LeaseTable, "void", void)


def keeps_claims_of_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HandoverTable, "sweep", lambda table, now_s: None)


def confirms_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """P says that it held blocks which it has given back."""
    monkeypatch.setattr(LeaseTable, "release", lambda table, *unused: True)


FAULTS = [
    forgets_nothing_of_ended_claims,
    never_expires,
    answers_twice,
    leaks_blocks,
    keeps_claims_of_the_dead,
    confirms_everything,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    wanted = settings(FAULT_WANTED, stateful_step_count=40)
    with pytest.raises((AssertionError, KeyError)):  # the table may stumble over it first
        run_state_machine_as_test(Meetings, settings=wanted)
