"""``ClientSession``: each claim gets its answer by its deadline, whatever arrives or does not."""

from __future__ import annotations

import pytest
from contract.examples import examples
from fakes.builders import (
    INSTANCE,
    SECRET,
    make_admitted,
    make_appointment,
    make_endpoint,
    make_fingerprint,
    make_gone,
    make_grant,
    make_queued,
    make_ticket,
    make_welcome,
)
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    Announce,
    Claim,
    Drop,
    Hello,
    Message,
    Reject,
    Renew,
    Unknown,
    decode,
    encode,
    read_fingerprint,
)
from vllm_llmdd_connector.control.session import (
    ClientSession,
    Granted,
    InQueue,
    Invited,
    Outcome,
    Reaction,
    Refused,
)
from vllm_llmdd_connector.control.session_state import SessionState
from vllm_llmdd_connector.deadlines import RESEND_S, Deadlines
from vllm_llmdd_connector.errors import LocalProtocolError
from vllm_llmdd_connector.params import AnyTicket

ADDRESS = ("127.0.0.1", 4000)
RENEW_S = 10.0
TICKET = make_ticket()


def make_session() -> ClientSession:
    return ClientSession(ADDRESS, make_fingerprint(), takes_push=True, deadlines=Deadlines())


def ready_session() -> ClientSession:
    session = make_session()
    session.claim(1, TICKET, 100.0, 0.0)
    session.on_message(make_welcome(), 0.0)
    return session


def granted_session() -> ClientSession:
    session = ready_session()
    session.on_message(make_grant(1), 0.0)
    return session


def names(reaction: Reaction) -> list[str]:
    return [type(message).__name__ for message in reaction.send]


class TestOpening:
    def test_first_claim_says_hello_with_version_and_fingerprint(self) -> None:
        (hello,) = make_session().claim(1, TICKET, 5.0, 0.0).send
        assert isinstance(hello, Hello)
        assert hello.version == PROTOCOL_VERSION
        assert read_fingerprint(hello.fingerprint) == make_fingerprint()

    def test_more_claims_while_opening_do_not_repeat_the_hello(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        assert names(session.claim(2, TICKET, 5.0, 0.1)) == []

    def test_lost_hello_is_sent_again(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        assert names(session.tick(RESEND_S)) == ["Hello"]

    def test_welcome_sends_all_waiting_claims(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        session.claim(2, TICKET, 5.0, 0.0)
        sent = session.on_message(make_welcome(session=77), 0.5).send
        claims = [message for message in sent if isinstance(message, Claim)]
        assert [(claim.session, claim.claim_id) for claim in claims] == [(77, 1), (77, 2)]
        assert claims[0].secret == SECRET
        assert claims[0].production == TICKET.production
        assert session.state is SessionState.READY

    def test_reject_refuses_all_claims_with_p_s_sentence(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        session.claim(2, TICKET, 5.0, 0.0)
        reaction = session.on_message(Reject(reason="dtype differs"), 0.1)
        assert reaction.outcomes == [
            Refused(1, "handshake", "dtype differs"),
            Refused(2, "handshake", "dtype differs"),
        ]
        assert session.state is SessionState.REJECTED
        with pytest.raises(LocalProtocolError, match="rejected"):
            session.claim(3, TICKET, 5.0, 0.2)

    @pytest.mark.parametrize("workers", [(), (make_endpoint(), make_endpoint())])
    def test_welcome_with_another_number_of_workers_is_refused(
        self, workers: tuple[object, ...]
    ) -> None:
        """Each D rank takes its endpoint by number, so a short list once ended D's engine."""
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        (outcome,) = session.on_message(make_welcome(workers=workers), 0.1).outcomes
        assert isinstance(outcome, Refused)
        assert f"local 1, prefill server {len(workers)}" in outcome.reason
        assert session.state is SessionState.REJECTED

    def test_grant_before_welcome_is_ignored(self) -> None:
        """It came from a process that was replaced meanwhile: its workers are not known."""
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        assert session.on_message(make_grant(1), 0.1) == Reaction()

    def test_silent_peer_ends_the_session_with_its_last_claim(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        session.claim(2, TICKET, 6.0, 0.0)
        (first,) = session.tick(5.0).outcomes
        assert isinstance(first, Refused)
        assert (first.claim_id, first.stage) == (1, "handshake")
        assert not session.is_over
        assert len(session.tick(6.0).outcomes) == 1
        assert session.state is SessionState.CLOSED

    def test_lost_connection_refuses_all_claims(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        assert session.on_lost("refused").outcomes == [Refused(1, "connection", "refused")]
        assert session.state is SessionState.CLOSED
        assert session.on_lost("again") == Reaction()


class TestReady:
    def test_grant_gives_blocks_and_workers_once(self) -> None:
        session = ready_session()
        outcomes = session.on_message(make_grant(1), 0.1).outcomes
        assert outcomes == [Granted(1, 5, 1, SECRET, ((7, 8, 9),), (make_endpoint(),))]
        assert session.on_message(make_grant(1), 0.1).outcomes == []

    def test_gone_refuses_the_claim_once(self) -> None:
        session = ready_session()
        assert session.on_message(make_gone(1), 0.1).outcomes == [Refused(1, "claim", "released")]
        assert session.on_message(make_gone(1), 0.1).outcomes == []

    def test_claim_without_answer_is_sent_again_then_refused_by_its_deadline(self) -> None:
        session = ready_session()
        assert names(session.tick(RESEND_S)) == ["Claim"]
        last = session.tick(100.0)
        (outcome,) = last.outcomes
        assert isinstance(outcome, Refused)
        assert outcome.stage == "claim"
        assert names(last) == ["Drop"]
        assert session.tick(200.0) == Reaction()

    def test_ticket_of_an_earlier_process_is_refused_when_p_says_that_it_is_the_same(self) -> None:
        session = granted_session()
        reaction = session.claim(2, make_ticket(instance="older"), 100.0, 0.0)
        assert (reaction.outcomes, names(reaction)) == ([], ["Hello"])
        answer = session.on_message(make_welcome(), 0.1)
        assert answer.outcomes == [Refused(2, "claim", "the prefill server was restarted")]
        assert names(answer) == []
        assert session.num_claims == 1

    def test_ticket_of_a_later_process_is_claimed_when_p_says_that_it_is_another(self) -> None:
        """P's machine had lost its power: no connection was closed, and D's session was READY.

        D refused every ticket of the new process without sending anything, so nothing ever told it
        that its session was over, and it prefilled all prompts of this P itself for good.
        """
        session = granted_session()
        later = make_ticket(instance="later")
        assert names(session.claim(2, later, 100.0, 0.0)) == ["Hello"]
        answer = session.on_message(make_welcome(session=6, instance="later"), 0.1)
        assert answer.outcomes == [Refused(1, "claim", "the prefill server was restarted")]
        (claim,) = answer.send
        assert isinstance(claim, Claim)
        assert (claim.session, claim.claim_id) == (6, 2)

    def test_p_that_does_not_say_who_it_is_is_asked_again_until_the_deadline(self) -> None:
        session = granted_session()
        session.claim(2, make_ticket(instance="later"), 2.5, 0.0)
        assert names(session.tick(RESEND_S)) == ["Hello"]
        (outcome,) = session.tick(2.5).outcomes
        assert isinstance(outcome, Refused)
        assert outcome.claim_id == 2

    def test_welcome_that_nobody_asked_for_changes_nothing(self) -> None:
        session = granted_session()
        assert session.on_message(make_welcome(session=4, instance="older"), 0.1) == Reaction()
        assert session.num_claims == 1

    def test_granted_claims_are_renewed_until_finished(self) -> None:
        session = granted_session()
        (renew,) = session.tick(RENEW_S).send
        assert renew == Renew(session=5, claim_ids=(1,))
        assert names(session.tick(RENEW_S + 1)) == []
        session.finish(1)
        assert names(session.tick(3 * RENEW_S)) == []
        assert session.num_claims == 0

    def test_renewal_answered_with_gone_is_an_outcome(self) -> None:
        session = granted_session()
        assert session.on_message(make_gone(1), 20.0).outcomes == [Refused(1, "claim", "released")]

    def test_unknown_session_starts_over_and_keeps_what_was_not_granted(self) -> None:
        session = granted_session()
        session.claim(2, TICKET, 100.0, 0.0)
        reaction = session.on_message(Unknown(session=5), 1.0)
        assert reaction.outcomes == [Refused(1, "claim", "the prefill server was restarted")]
        assert names(reaction) == ["Hello"]
        again = session.on_message(make_welcome(session=6, instance="new"), 1.1)
        assert [type(outcome) for outcome in again.outcomes] == [Refused]

    def test_unknown_of_another_session_is_ignored(self) -> None:
        session = granted_session()
        assert session.on_message(Unknown(session=4), 1.0) == Reaction()
        assert session.state is SessionState.READY


class TestDrop:
    def test_drop_in_a_ready_session_is_sent_at_once_with_the_secret(self) -> None:
        (drop,) = granted_session().drop(1, TICKET, 5.0, 1.0).send
        assert drop == Drop(session=5, claim_id=1, production=1, secret=SECRET)

    def test_drop_while_opening_is_kept_until_welcome(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 5.0, 0.0)
        session.drop(1, TICKET, 5.0, 0.1)
        assert names(session.on_message(make_welcome(), 0.2)) == ["Drop"]

    def test_drop_kept_too_long_ends_with_the_session(self) -> None:
        session = make_session()
        session.drop(1, TICKET, 5.0, 0.0)
        assert session.tick(5.0).outcomes == []
        assert session.state is SessionState.CLOSED

    def test_drop_for_an_earlier_process_is_not_sent(self) -> None:
        assert names(ready_session().drop(9, make_ticket(instance="older"), 5.0, 0.5)) == []

    def test_grant_after_a_drop_is_no_outcome_and_is_not_renewed(self) -> None:
        session = ready_session()
        session.drop(1, TICKET, 5.0, 0.1)
        assert session.on_message(make_grant(1), 0.2) == Reaction()
        assert names(session.tick(2 * RENEW_S)) == []


class TestNextEvent:
    def test_idle_session_needs_no_wake_up(self) -> None:
        session = granted_session()
        session.finish(1)
        assert session.next_event_s() is None

    def test_open_claim_wakes_for_its_resend_and_its_deadline(self) -> None:
        session = make_session()
        session.claim(1, TICKET, 0.5, 0.0)
        session.claim(2, TICKET, 9.0, 0.0)
        assert session.next_event_s() == 0.5
        session.tick(0.5)
        assert session.next_event_s() == RESEND_S

    def test_granted_claim_wakes_for_its_renewal(self) -> None:
        assert granted_session().next_event_s() == RENEW_S


class LossyConversation(RuleBasedStateMachine):
    """A D with sessions as its owner keeps them, a P of few rules, and a network that loses,
    doubles and reorders messages. P may be restarted at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.session = make_session()
        self.p_session, self.p_instance = 1, INSTANCE
        self.to_p: list[bytes] = []
        self.to_d: list[bytes] = []
        self.next_claim = 1
        self.deadlines: dict[int, float] = {}
        self.outcomes: dict[int, list[Outcome]] = {}
        self.closed: set[int] = set()
        """Claims that D dropped or finished: no outcome may come any more."""

    @initialize()
    def first(self) -> None:
        self.new_claim(5.0, False)

    @rule(limit_s=st.floats(0.1, 8.0))
    def new_appointment(self, limit_s: float) -> None:
        self.new_claim(limit_s, False, make_appointment())

    @rule(limit_s=st.floats(0.1, 8.0), is_stale=st.booleans(), ticket=st.none())
    def new_claim(self, limit_s: float, is_stale: bool, ticket: AnyTicket | None = None) -> None:
        if self.session.is_over:
            self.session = make_session()
        if ticket is None:
            ticket = make_ticket(instance="older" if is_stale else self.p_instance)
        claim_id, self.next_claim = self.next_claim, self.next_claim + 1
        self.deadlines[claim_id] = self.now_s + limit_s
        self.outcomes[claim_id] = []
        self.react(self.session.claim(claim_id, ticket, self.now_s + limit_s, self.now_s))

    @precondition(lambda self: not self.session.is_over)
    @rule(data=st.data())
    def d_has_blocks(self, data: st.DataObject) -> None:
        invited = [
            claim_id
            for claim_id, outcomes in self.outcomes.items()
            if any(isinstance(outcome, Invited) for outcome in outcomes)
        ]
        if invited:
            claim_id = data.draw(st.sampled_from(invited))
            self.react(self.session.has_blocks(claim_id, self.now_s))

    @rule(data=st.data())
    def drop_or_finish(self, data: st.DataObject) -> None:
        claim_id = data.draw(st.integers(1, self.next_claim - 1))
        self.closed.add(claim_id)
        if data.draw(st.booleans()):
            deadline_s = self.now_s + 5.0
            self.react(self.session.drop(claim_id, make_ticket(), deadline_s, self.now_s))
        else:
            self.session.finish(claim_id)

    @rule(seconds=st.floats(0.01, 4.0))
    def time_passes(self, seconds: float) -> None:
        """The owner sleeps until the next event, rounded up to milliseconds."""
        end_s = self.now_s + seconds
        for _ in range(1000):
            next_s = None if self.session.is_over else self.session.next_event_s()
            if next_s is None or next_s > end_s:
                break
            self.now_s = max(self.now_s, next_s) + 0.001
            self.react(self.session.tick(self.now_s))
        else:
            raise AssertionError("the session asks to be woken again and again")
        self.now_s = max(self.now_s, end_s)

    @precondition(lambda self: self.to_p)
    @rule(data=st.data())
    def p_handles_one(self, data: st.DataObject) -> None:
        message = decode(data.draw(st.sampled_from(self.to_p)))
        answer: Message | None = None
        if isinstance(message, Hello):
            answer = make_welcome(session=self.p_session, instance=self.p_instance)
        elif isinstance(message, Claim | Announce | Renew | Drop):
            if message.session != self.p_session:
                answer = Unknown(session=message.session)
            elif isinstance(message, Claim):
                is_held = data.draw(st.booleans())
                make = make_grant if is_held else make_gone
                answer = make(message.claim_id)
            elif isinstance(message, Announce):
                makers = (make_grant, make_gone, make_queued, make_admitted)
                answer = data.draw(st.sampled_from(makers))(message.claim_id)
        if answer is not None:
            self.to_d.append(encode(answer))

    @precondition(lambda self: self.to_d and not self.session.is_over)
    @rule(data=st.data())
    def d_receives_one(self, data: st.DataObject) -> None:
        """The same one may be drawn again, and others never."""
        message = decode(data.draw(st.sampled_from(self.to_d)))
        self.react(self.session.on_message(message, self.now_s))

    @rule()
    def p_restarts_and_zmq_reconnects(self) -> None:
        self.p_session += 1
        self.p_instance = f"instance{self.p_session}"

    @precondition(lambda self: not self.session.is_over)
    @rule()
    def connection_is_lost(self) -> None:
        self.react(self.session.on_lost("lost"))

    @invariant()
    def every_claim_has_one_answer_by_its_deadline(self) -> None:
        for claim_id, outcomes in self.outcomes.items():
            known = [type(outcome) for outcome in outcomes]
            if self.deadlines[claim_id] < self.now_s and claim_id not in self.closed:
                assert known, f"claim {claim_id} had no answer by its deadline"
            kinds = [kind for kind in known if kind not in (InQueue, Invited)]
            # After the grant or the refusal of a claim nothing else says how it stands.
            assert known[len(known) - len(kinds) :] == kinds
            # A granted claim may be refused later, when P tells that its lease has ended.
            assert kinds in ([], [Granted], [Refused], [Granted, Refused])

    def react(self, reaction: Reaction) -> None:
        self.to_p.extend(encode(message) for message in reaction.send)
        for outcome in reaction.outcomes:
            assert outcome.claim_id not in self.closed
            self.outcomes[outcome.claim_id].append(outcome)


TestLossyConversation = LossyConversation.TestCase
TestLossyConversation.settings = settings(examples(40))
