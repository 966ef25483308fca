"""``ClientSession`` with claims on prompts that P has still to compute."""

from __future__ import annotations

import pytest
from fakes.builders import (
    SECRET,
    make_appointment,
    make_endpoint,
    make_fingerprint,
    make_gone,
    make_grant,
    make_ticket,
    make_welcome,
)

from vllm_llmdd_connector.control.messages import (
    Admitted,
    Announce,
    AnyMessage,
    Claim,
    Drop,
    Message,
    Queued,
    Renew,
    Unknown,
)
from vllm_llmdd_connector.control.session import (
    ClientSession,
    Granted,
    InQueue,
    Invited,
    Outcome,
    Reaction,
    Refused,
    SessionState,
)
from vllm_llmdd_connector.deadlines import RESEND_S, Deadlines

APPOINTMENT = make_appointment()
RENEW_S = 10.0
QUEUED, ADMITTED = Queued(claim_id=1), Admitted(claim_id=1)


def opening_session(takes_push: bool = True) -> ClientSession:
    session = ClientSession(("127.0.0.1", 4000), make_fingerprint(), takes_push, Deadlines())
    session.claim(1, APPOINTMENT, 5.0, 0.0)
    return session


def ready_session() -> ClientSession:
    """Claim 1 is announced and not answered."""
    session = opening_session()
    session.on_message(make_welcome(), 0.0)
    return session


def known_session() -> ClientSession:
    session = ready_session()
    session.on_message(QUEUED, 0.0)
    return session


def announce(**changes: bool) -> Announce:
    fields = {"takes_push": True, "has_blocks": False}
    return Announce(
        session=5,
        claim_id=1,
        transfer_id="transfer",
        num_tokens=40,
        prompt_hash=APPOINTMENT.prompt_hash,
        **{**fields, **changes},
    )


def outcomes(session: ClientSession, message: AnyMessage, now_s: float = 0.1) -> list[Outcome]:
    reaction = session.on_message(message, now_s)
    assert reaction.send == []
    return reaction.outcomes


class TestAnnounce:
    @pytest.mark.parametrize("takes_push", [True, False])
    def test_appointment_is_announced_after_the_welcome(self, takes_push: bool) -> None:
        reaction = opening_session(takes_push).on_message(make_welcome(), 0.1)
        assert reaction.send == [announce(takes_push=takes_push)]
        assert reaction.outcomes == []

    def test_appointment_is_with_whichever_process_answers(self) -> None:
        session = opening_session()
        reaction = session.on_message(make_welcome(instance="whoever"), 0.1)
        assert reaction.send == [announce()]

    def test_announcement_without_an_answer_is_sent_again_then_refused_and_dropped(self) -> None:
        session = ready_session()
        assert session.tick(RESEND_S).send == [announce()]
        late = session.tick(5.0)
        (outcome,) = late.outcomes
        assert isinstance(outcome, Refused)
        assert (outcome.claim_id, outcome.stage) == (1, "announce")
        drop = Drop(session=5, claim_id=1, production=0, secret="transfer")
        assert late.send == [drop]
        assert session.num_claims == 0

    def test_both_kinds_of_claims_share_a_session(self) -> None:
        session = ready_session()
        (claim,) = session.claim(2, make_ticket(), 5.0, 0.0).send
        assert isinstance(claim, Claim)
        assert claim.secret == SECRET


class TestAnswers:
    def test_queued_claim_is_known_and_never_too_late(self) -> None:
        """From here on the owner's own deadline counts."""
        session = ready_session()
        assert outcomes(session, QUEUED) == [InQueue(1)]
        for now_s in (RESEND_S + 0.1, 5.0, 9.9):
            assert session.tick(now_s) == Reaction()
        assert session.tick(RENEW_S).send == [Renew(session=5, claim_ids=(1,))]

    def test_admitted_claim_is_an_invitation_with_p_s_workers(self) -> None:
        invited = Invited(1, 5, (make_endpoint(),))
        assert outcomes(ready_session(), ADMITTED) == [invited]
        assert outcomes(known_session(), ADMITTED) == [invited]

    def test_queued_claim_may_be_granted_at_last(self) -> None:
        session = known_session()
        granted = Granted(1, 5, 1, "transfer", ((7, 8, 9),), (make_endpoint(),))
        assert outcomes(session, make_grant(1, secret="transfer")) == [granted]
        assert outcomes(session, make_grant(1, secret="transfer")) == []

    @pytest.mark.parametrize("late", [QUEUED, ADMITTED], ids=["queued", "admitted"])
    def test_answer_that_the_grant_overtook_says_nothing(self, late: AnyMessage) -> None:
        session = known_session()
        session.on_message(make_grant(1), 0.1)
        assert outcomes(session, late) == []

    @pytest.mark.parametrize("answer", [QUEUED, ADMITTED], ids=["queued", "admitted"])
    def test_gone_after_an_answer_refuses_the_claim_once(self, answer: AnyMessage) -> None:
        session = ready_session()
        session.on_message(answer, 0.1)
        assert outcomes(session, make_gone(1)) == [Refused(1, "announce", "released")]
        assert outcomes(session, make_gone(1)) == []
        assert session.tick(2 * RENEW_S) == Reaction()

    @pytest.mark.parametrize("answer", [QUEUED, ADMITTED], ids=["queued", "admitted"])
    def test_answer_before_the_welcome_is_ignored(self, answer: AnyMessage) -> None:
        """It came from a process that was replaced meanwhile: its workers are not known."""
        assert outcomes(opening_session(), answer) == []

    @pytest.mark.parametrize("answer", [Queued(claim_id=9), Admitted(claim_id=9)])
    def test_answer_for_an_unknown_claim_is_ignored(self, answer: AnyMessage) -> None:
        assert outcomes(ready_session(), answer) == []

    @pytest.mark.parametrize("answer", [QUEUED, ADMITTED], ids=["queued", "admitted"])
    def test_answer_after_a_drop_is_no_outcome(self, answer: AnyMessage) -> None:
        session = ready_session()
        session.drop(1, APPOINTMENT, 5.0, 0.1)
        assert outcomes(session, answer) == []


class TestHasBlocks:
    def test_blocks_are_announced_at_once_and_stay_announced(self) -> None:
        session = ready_session()
        assert session.has_blocks(1, 0.5).send == [announce(has_blocks=True)]
        assert session.tick(0.5 + RESEND_S).send == [announce(has_blocks=True)]

    def test_known_claim_is_announced_once_more_and_renewed(self) -> None:
        session = known_session()
        assert session.has_blocks(1, 0.5).send == [announce(has_blocks=True)]
        assert session.tick(0.5 + RESEND_S).send == []
        assert session.tick(RENEW_S).send == [Renew(session=5, claim_ids=(1,))]

    def test_blocks_of_an_unknown_claim_are_announced_to_nobody(self) -> None:
        assert ready_session().has_blocks(9, 0.5) == Reaction()

    def test_blocks_are_not_announced_before_the_welcome(self) -> None:
        assert opening_session().has_blocks(1, 0.5) == Reaction()


class TestDrop:
    def test_drop_names_the_transfer_and_no_production(self) -> None:
        drop = Drop(session=5, claim_id=1, production=0, secret="transfer")
        assert known_session().drop(1, APPOINTMENT, 5.0, 0.1).send == [drop]

    def test_drop_while_opening_reaches_whoever_answers(self) -> None:
        session = opening_session()
        session.drop(1, APPOINTMENT, 5.0, 0.1)
        sent: list[Message] = session.on_message(make_welcome(instance="whoever"), 0.2).send
        assert sent == [Drop(session=5, claim_id=1, production=0, secret="transfer")]


class TestRestart:
    def test_known_claims_are_refused_and_the_others_announced_to_the_successor(self) -> None:
        session = known_session()
        session.claim(2, make_appointment(transfer_id="other"), 9.0, 0.0)
        reaction = session.on_message(Unknown(session=5), 1.0)
        assert reaction.outcomes == [Refused(1, "announce", "the prefill server was restarted")]
        again = session.on_message(make_welcome(session=6, instance="new"), 1.1)
        assert [type(message) for message in again.send] == [Announce]
        assert again.outcomes == []
        assert session.state is SessionState.READY

    def test_lost_connection_refuses_the_invited(self) -> None:
        session = ready_session()
        session.on_message(ADMITTED, 0.1)
        assert session.on_lost("lost").outcomes == [Refused(1, "connection", "lost")]
