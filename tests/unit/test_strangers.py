"""What clients and peers of ill will can do: name others' addresses, and ask for more."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from fakes.builders import concurrent_params, decode_params, make_fingerprint
from fakes.clock import FakeClock, wait_for
from fakes.http_server import FakeMetaserver, serving
from fakes.meeting import Meeting
from fakes.p_scheduler import FakePScheduler
from fakes.prefiller import LEASE_S, PROMPT, Prefiller
from fakes.push_side import PushSide
from fakes.requests import make_request
from fakes.scheduler_side import make_side

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    BlockSpan,
    CacheToken,
    Claim,
    Gone,
    Hello,
    Knock,
    Welcome,
    raw_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.params import read_ticket
from vllm_llmdd_connector.scheduler.lease import MAX_CLAIMS
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector

ELSEWHERE = ("10.0.0.0/8",)
MANY = 10_000


@pytest.fixture
def d(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerConnector]:
    """Its peers are elsewhere, so whoever answers on loopback is a stranger to it."""
    side = make_side("kv_consumer", monkeypatch, allowed_peers=ELSEWHERE)
    yield side
    side.shutdown()


@pytest.fixture
def p(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerConnector]:
    side = make_side("kv_producer", monkeypatch, allowed_peers=ELSEWHERE)
    yield side
    side.shutdown()


@pytest.fixture
def stranger() -> Iterator[FakePScheduler]:
    made = FakePScheduler(name="stranger")
    yield made
    made.close()


@pytest.fixture
def metaserver() -> Iterator[FakeMetaserver]:
    with serving() as fake:
        yield fake


def is_prefilled_locally(d: SchedulerConnector, params: dict[str, Any]) -> bool:
    request = make_request("cmpl-a-0-0123abcd", PROMPT, params)
    d.on_new_request(request)
    return d.get_num_new_matched_tokens(request, 0) == (0, False)


class TestForeignAddresses:
    """What must not be dialled would have answered: after the shutdown it has heard nothing."""

    @pytest.mark.parametrize("make", [decode_params, concurrent_params])
    def test_d_dials_no_p_outside_its_list(
        self, d: SchedulerConnector, stranger: FakePScheduler, make: Any
    ) -> None:
        params = make()
        params["remote_port"] = stranger.port
        assert is_prefilled_locally(d, params)
        d.shutdown()
        assert stranger.received == []

    def test_d_asks_no_metaserver_outside_its_list(
        self, d: SchedulerConnector, metaserver: FakeMetaserver
    ) -> None:
        params = {"do_remote_prefill": True, "metaserver": metaserver.url}
        assert is_prefilled_locally(d, params)
        d.shutdown()
        assert metaserver.bodies == []

    def test_p_knocks_at_no_d_outside_its_list(
        self, p: SchedulerConnector, stranger: FakePScheduler
    ) -> None:
        params = {
            "do_remote_decode": True,
            "transfer_id": "t",
            "remote_host": "127.0.0.1",
            "remote_port": stranger.port,
        }
        p.on_new_request(make_request("r", PROMPT, params))
        p.shutdown()
        assert stranger.received == []

    def test_d_follows_no_knock_to_a_p_outside_its_list(
        self,
        monkeypatch: pytest.MonkeyPatch,
        metaserver: FakeMetaserver,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        d = make_side("kv_consumer", monkeypatch)
        metaserver.hold = True
        params = {"do_remote_prefill": True, "metaserver": metaserver.url}
        request = make_request("cmpl-a-0-0123abcd", PROMPT, params)
        d.on_new_request(request)
        wait_for(lambda: metaserver.bodies, "the post")
        body = metaserver.bodies[0]
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dialer = Dialer(context, "127.0.0.1", body["remote_port"])
        knock = Knock(transfer_id=body["transfer_id"], host="10.1.2.3", port=1)
        dialer.send([knock] * 5)

        def is_told() -> bool:
            return any("is not in allowed_peers" in r.getMessage() for r in caplog.records)

        wait_for(is_told, "the warning")
        assert d.get_num_new_matched_tokens(request, 0) == (None, False), "the true P may come"
        dialer.close()
        context.term()
        d.shutdown()
        assert len([r for r in caplog.records if "10.1.2.3" in r.getMessage()]) == 1


class TestLeases:
    def test_ten_thousand_prompts_without_a_d_stay_below_the_cap_and_all_end(
        self, clock: FakeClock
    ) -> None:
        prefiller = Prefiller(clock)
        for number in range(MANY):
            first = 1 + 3 * (number % 33)
            prefiller.finish(f"p{number}", (first, first + 1, first + 2))
            clock.advance(0.01)
            prefiller.step()
            assert len(prefiller.pool.in_use) <= 50
        counts = prefiller.counts()
        assert counts["leases_opened"] + counts["leases_over_cap"] == MANY
        clock.advance(LEASE_S)
        prefiller.step()
        assert (prefiller.producer.num_leases, prefiller.pool.in_use) == (0, [])
        assert (
            prefiller.counts()["leases_expired"] + counts["leases_expired"]
            == (counts["leases_opened"])
        )

    def test_prompts_to_be_pushed_that_no_d_asks_for_stay_below_it_too(
        self, clock: FakeClock
    ) -> None:
        """Each was taken for one that a D counts on, beyond what pulled prompts held already."""
        meeting = Meeting(clock, unreserved_fraction=1.0)
        for number in range(30):
            first = 1 + 3 * number
            blocks = (first, first + 1, first + 2)
            request = meeting.arrive(f"p{number}", f"t{number}")
            meeting.schedule(request, blocks=blocks)
            meeting.finish(request, blocks=blocks)
        assert len(meeting.pool.in_use) <= 50
        clock.advance(LEASE_S)
        meeting.p.step()
        assert (meeting.num_handovers, meeting.pool.in_use) == (0, [])

    def test_claims_on_one_prompt_are_bounded(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock)
        ticket = prefiller.ticket()
        for claim_id in range(1, MAX_CLAIMS + 1):
            prefiller.claim(ticket, claim_id)
        (refused,) = prefiller.claim(ticket, MAX_CLAIMS + 1)
        assert isinstance(refused, Gone)
        assert "have claimed this prompt already" in refused.reason


class TestReservations:
    """A D that asks P's worker for what is not its own."""

    @pytest.mark.parametrize(
        ("span", "sent"),
        [
            (BlockSpan(first=3, count=1), []),
            (BlockSpan(first=0, count=4), [[4, 5, 6]]),
            (BlockSpan(first=2**30, count=9), []),
        ],
        ids=str,
    )
    def test_blocks_beyond_the_prompt_are_not_sent(
        self, clock: FakeClock, span: BlockSpan, sent: list[list[int]]
    ) -> None:
        side = PushSide(clock)
        side.step()
        side.reserve(spans=(span,))
        assert [task.src_blocks for task in side.tasks] == sent
        assert side.answers == []
        side.close()

    def test_another_transfer_s_name_opens_nothing(self, clock: FakeClock) -> None:
        side = PushSide(clock)
        side.step()
        side.reserve(transfer_id="guessed")
        assert side.tasks == []
        side.close()

    def test_reservation_that_was_given_up_is_not_opened_by_a_replay(
        self, clock: FakeClock
    ) -> None:
        side = PushSide(clock)
        side.step()
        side.reserve()
        (task,) = side.tasks
        side.cancel()
        side.reserve()
        assert side.tasks == [task]
        side.close()

    @pytest.mark.parametrize(
        "changes",
        [
            {"to_cluster": 0xB},
            {"spans": ()},
            {"tokens": (CacheToken(model_id=7, token=1),)},
        ],
        ids=["another rank", "no groups", "another cache"],
    )
    def test_what_fits_nothing_is_refused(self, clock: FakeClock, changes: dict[str, Any]) -> None:
        side = PushSide(clock)
        side.step()
        with pytest.raises(RemoteProtocolError):
            side.reserve(**changes)
        assert side.tasks == []
        side.close()


class TestForgery:
    def test_claim_of_an_ended_lease_is_worth_nothing_when_it_is_repeated(
        self, clock: FakeClock
    ) -> None:
        prefiller = Prefiller(clock)
        ticket = prefiller.ticket()
        prefiller.claim(ticket)
        prefiller.release(ticket)
        prefiller.step()
        for claim_id in (1, 2):
            (answer,) = prefiller.claim(ticket, claim_id)
            assert isinstance(answer, Gone)
        assert prefiller.pool.in_use == []

    def test_secrets_are_not_guessed_from_one_another(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock)
        tickets = [prefiller.ticket(f"p{n}", (4 + n, 20 + n, 40 + n)) for n in range(10)]
        assert len({ticket.secret for ticket in tickets}) == 10
        for ticket, other in itertools.pairwise(tickets):
            (answer,) = prefiller.claim(ticket, 1, secret=other.secret)
            assert isinstance(answer, Gone)

    def test_a_restarted_p_takes_no_message_of_its_predecessor_s_sessions(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Played back against the next process at the same address: its session is another."""
        hello = Hello(version=PROTOCOL_VERSION, fingerprint=raw_fingerprint(make_fingerprint()))
        sessions = []
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for _ in range(2):
            p = make_side("kv_producer", monkeypatch)
            dialer = Dialer(context, "127.0.0.1", _port_of(p))
            dialer.send([hello])
            welcome = _next(dialer)
            assert isinstance(welcome, Welcome)
            sessions.append(welcome.session)
            if len(sessions) == 2:
                claim = Claim(
                    session=sessions[0], claim_id=1, production=1, secret="s", prompt_hash="h"
                )
                dialer.send([claim])
                assert type(_next(dialer)).__name__ == "Unknown"
            dialer.close()
            p.shutdown()
        context.term()
        assert sessions[0] != sessions[1]


def _port_of(p: SchedulerConnector) -> int:
    """P's control port, as its answers name it."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    request = make_request("r", PROMPT, params, status="FINISHED_STOPPED")
    pool: Any = p._producer._block_pool  # type: ignore[union-attr]
    pool.allocate((1, 2, 3))
    _, answer = p.request_finished(request, [(1, 2, 3)])
    assert answer is not None
    return read_ticket(answer).port


def _next(dialer: Dialer) -> Any:
    received: list[Any] = []
    deadline_s = time.monotonic() + 20
    while not received and time.monotonic() < deadline_s:
        dialer.socket.poll(1000)
        received, _ = dialer.receive()
    return received[0]
