"""``ControlClient``: real sockets to P schedulers of the test's making."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.builders import (
    SECRET,
    make_appointment,
    make_endpoint,
    make_fingerprint,
    make_gone,
    make_ticket,
)
from fakes.clock import wait_for
from fakes.p_scheduler import HOST, FakePScheduler
from fakes.threads import falls_asleep, named_thread

from vllm_llmdd_connector.control.client import ControlClient
from vllm_llmdd_connector.control.messages import (
    Admitted,
    Announce,
    Claim,
    Drop,
    Hello,
    Queued,
    Reject,
    Renew,
)
from vllm_llmdd_connector.control.session import Granted, InQueue, Invited, Outcome, Refused
from vllm_llmdd_connector.deadlines import Deadlines

LONG_S = 60.0
RENEW_S = 0.02


class Client:
    """A ``ControlClient`` with its outcomes by claim."""

    def __init__(self) -> None:
        self.num_junk = 0
        self.outcomes: dict[int, list[Outcome]] = {}
        self.control = ControlClient(
            make_fingerprint(), time.monotonic, self._count, takes_push=True, deadlines=Deadlines()
        )

    def claim(self, port: int, claim_id: int = 1, within_s: float = LONG_S, **ticket: Any) -> None:
        made = make_ticket(**{"host": HOST, "port": port, **ticket})
        self.control.claim(claim_id, made, time.monotonic() + within_s)

    def drop(self, port: int, claim_id: int = 1, within_s: float = LONG_S) -> None:
        made = make_ticket(host=HOST, port=port)
        self.control.drop(claim_id, made, time.monotonic() + within_s)

    def outcome(self, claim_id: int = 1, number: int = 0) -> Outcome:
        """Wait for the claim's outcome of this number."""
        wait_for(lambda: len(self._of(claim_id)) > number, f"outcome {number} of {claim_id}")
        return self._of(claim_id)[number]

    def _of(self, claim_id: int) -> list[Outcome]:
        for outcome in self.control.take_outcomes():
            self.outcomes.setdefault(outcome.claim_id, []).append(outcome)
        return self.outcomes.get(claim_id, [])

    def _count(self, number: int) -> None:
        self.num_junk += number


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.control.close()


@pytest.fixture
def make_p() -> Iterator[Callable[..., FakePScheduler]]:
    started: list[FakePScheduler] = []

    def make(**options: Any) -> FakePScheduler:
        started.append(FakePScheduler(**options))
        return started[-1]

    yield make
    for p in started:
        p.close()


@pytest.fixture
def p(make_p: Callable[..., FakePScheduler]) -> FakePScheduler:
    return make_p()


class TestClaims:
    def test_claim_is_granted_with_p_s_workers(self, client: Client, p: FakePScheduler) -> None:
        client.claim(p.port)
        assert client.outcome() == Granted(1, 5, 1, SECRET, ((7, 8, 9),), (make_endpoint(),))

    def test_all_claims_at_one_p_share_one_session(self, client: Client, p: FakePScheduler) -> None:
        for claim_id in range(1, 6):
            client.claim(p.port, claim_id)
        for claim_id in range(1, 6):
            assert isinstance(client.outcome(claim_id), Granted)
        assert len(p.of_type(Hello)) == 1

    def test_sessions_with_two_p_do_not_disturb_each_other(
        self, client: Client, make_p: Callable[..., FakePScheduler]
    ) -> None:
        silent, good = make_p(), make_p(name="good")
        silent.answers[Hello] = None
        client.claim(silent.port, 1)
        client.claim(good.port, 2)
        assert isinstance(client.outcome(2), Granted)
        assert 1 not in client.outcomes

    def test_granted_claim_is_renewed_until_finished(
        self, client: Client, p: FakePScheduler
    ) -> None:
        p.lease_s = 3 * RENEW_S
        client.claim(p.port)
        client.outcome()
        wait_for(lambda: len(p.of_type(Renew)) >= 3, "renewals")
        client.control.finish(1, make_ticket(host=HOST, port=p.port))
        client.drop(p.port, claim_id=2)
        wait_for(lambda: p.of_type(Drop), "the mark behind the last renewal")
        num_renewals = len(p.of_type(Renew))
        assert falls_asleep(named_thread("llmdd-control"))
        assert len(p.of_type(Renew)) == num_renewals

    def test_lease_that_ended_comes_back_as_refused(
        self, client: Client, p: FakePScheduler
    ) -> None:
        p.lease_s = 3 * RENEW_S
        client.claim(p.port)
        client.outcome()
        p.answers[Renew] = make_gone(1)
        refused = client.outcome(number=1)
        assert isinstance(refused, Refused)
        assert refused.stage == "claim"

    def test_drop_reaches_p_with_and_without_a_claim_before(
        self, client: Client, p: FakePScheduler
    ) -> None:
        client.drop(p.port, claim_id=8)
        wait_for(lambda: p.of_type(Drop), "the drop")
        client.claim(p.port, 9)
        client.outcome(9)
        client.drop(p.port, claim_id=9)
        wait_for(lambda: len(p.of_type(Drop)) == 2, "the second drop")
        assert [drop.claim_id for drop in p.of_type(Drop) if isinstance(drop, Drop)] == [8, 9]


class TestAppointments:
    def test_announcement_is_queued_then_invited_and_told_of_the_blocks(
        self, client: Client, p: FakePScheduler
    ) -> None:
        appointment = make_appointment(host=HOST, port=p.port)
        p.answers[Announce] = Queued(claim_id=1)
        client.control.claim(1, appointment, time.monotonic() + LONG_S)
        assert client.outcome() == InQueue(1)
        p.answers[Announce] = Admitted(claim_id=1)
        client.control.has_blocks(1, appointment)
        assert client.outcome(number=1) == Invited(1, 5, (make_endpoint(),))
        announced = [m for m in p.of_type(Announce) if isinstance(m, Announce)]
        assert [(m.takes_push, m.has_blocks) for m in announced] == [(True, False), (True, True)]

    def test_blocks_for_a_p_that_is_gone_open_no_session(
        self, client: Client, p: FakePScheduler
    ) -> None:
        client.control.has_blocks(1, make_appointment(host=HOST, port=p.port))
        client.claim(p.port, 2)
        client.outcome(2)
        assert [type(message) for message in p.received] == [Hello, Claim]

    def test_known_announcement_wakes_nobody_but_its_renewal(
        self, client: Client, p: FakePScheduler
    ) -> None:
        p.answers[Announce] = Queued(claim_id=1)
        appointment = make_appointment(host=HOST, port=p.port)
        client.control.claim(1, appointment, time.monotonic() + LONG_S)
        client.outcome()
        assert falls_asleep(named_thread("llmdd-control"))


class TestRefusals:
    def test_refused_connection_is_an_outcome_long_before_the_deadline(
        self, client: Client, p: FakePScheduler
    ) -> None:
        p.close()
        client.claim(p.port)
        outcome = client.outcome()
        assert isinstance(outcome, Refused)
        assert outcome.stage == "connection"
        assert f"{HOST}:{p.port} was refused or lost" in outcome.reason

    @pytest.mark.parametrize(("silence", "stage"), [(Hello, "handshake"), (Claim, "claim")])
    def test_silent_p_is_refused_by_the_deadline(
        self, client: Client, p: FakePScheduler, silence: type[Any], stage: str
    ) -> None:
        p.answers[silence] = None
        client.claim(p.port, within_s=0.05)
        outcome = client.outcome()
        assert isinstance(outcome, Refused)
        assert outcome.stage == stage

    def test_reject_is_logged_as_an_error_once(
        self, client: Client, p: FakePScheduler, caplog: pytest.LogCaptureFixture
    ) -> None:
        p.answers[Hello] = Reject(reason="dtype differs: local 'a', peer 'b'")
        logger = logging.getLogger("vllm.vllm_llmdd_connector.control.client")
        logger.addHandler(caplog.handler)
        try:
            for claim_id in (1, 2):
                client.claim(p.port, claim_id)
                outcome = client.outcome(claim_id)
                assert isinstance(outcome, Refused)
                assert outcome.reason.startswith("dtype differs")
        finally:
            logger.removeHandler(caplog.handler)
        errors = {id(record) for record in caplog.records if record.levelno >= logging.ERROR}
        assert len(errors) == 1
        assert len(p.of_type(Hello)) == 2

    def test_address_that_is_none_is_refused_and_others_are_served(
        self, client: Client, p: FakePScheduler
    ) -> None:
        """It came from a request's params, and once ended the thread for all requests."""
        client.claim(1, 1, host="127.0.0.0/8")
        client.claim(p.port, 2)
        refused = client.outcome(1)
        assert isinstance(refused, Refused)
        assert refused.stage == "connection"
        assert isinstance(client.outcome(2), Granted)

    def test_internal_error_of_one_claim_leaves_the_thread_alive(
        self, client: Client, p: FakePScheduler
    ) -> None:
        client.claim(p.port, 1)
        client.outcome(1)
        client.claim(p.port, 2, secret="\ud800", within_s=0.05)
        client.claim(p.port, 3)
        assert isinstance(client.outcome(3), Granted)
        assert isinstance(client.outcome(2), Refused)


class TestRestart:
    def test_p_that_dies_refuses_what_it_granted_and_its_successor_is_asked_anew(
        self, client: Client, p: FakePScheduler, make_p: Callable[..., FakePScheduler]
    ) -> None:
        client.claim(p.port, 1)
        client.outcome(1)
        p.close()
        lost = client.outcome(1, number=1)
        assert isinstance(lost, Refused)
        assert lost.stage == "connection"
        successor = make_p(port=p.port, name="successor")
        client.claim(successor.port, 2)
        assert isinstance(client.outcome(2), Granted)


class TestThread:
    def test_client_without_sessions_sleeps(self, client: Client) -> None:
        assert falls_asleep(named_thread("llmdd-control"))

    def test_open_session_without_claims_sleeps(self, client: Client, p: FakePScheduler) -> None:
        client.claim(p.port)
        client.outcome()
        client.control.finish(1, make_ticket(host=HOST, port=p.port))
        assert falls_asleep(named_thread("llmdd-control"))

    def test_close_is_idempotent_and_ends_the_thread(self, p: FakePScheduler) -> None:
        client = Client()
        client.claim(p.port)
        thread = named_thread("llmdd-control")
        client.control.close()
        client.control.close()
        client.claim(p.port, 2)
        assert not thread.is_alive()
