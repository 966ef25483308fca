"""D's requests that name a metaserver: from the post to the claim, and every way of giving up."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.clock import FakeClock, wait_for
from fakes.http_server import serving
from fakes.requests import make_request

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import Knock
from vllm_llmdd_connector.control.metaserver import MetaserverClient, OnAnswer
from vllm_llmdd_connector.control.session import Invited, Outcome
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.metadata import ReceiveJob, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import AnyTicket, Appointment
from vllm_llmdd_connector.scheduler.consumer import Consumer
from vllm_llmdd_connector.scheduler.summons import MAX_ENDED, SummonsTable

PROMPT = list(range(40))
URL = "http://127.0.0.1:8000/v1/metaserver"
CONFIG = ConnectorConfig()


class RecordingPoster:
    """Posts that are answered when the test says so."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.posts: dict[str, OnAnswer] = {}
        self.cancelled: list[str] = []

    def post(self, key: str, url: str, body: dict[str, Any], on_answer: OnAnswer) -> None:
        assert body == {"request": body["request"], "transfer": key}
        self.urls.append(url)
        self.posts[key] = on_answer

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)


class RecordingControl:
    """The control plane, as a list of what it was asked."""

    def __init__(self) -> None:
        self.claims: dict[int, AnyTicket] = {}
        self.reserved: list[int] = []
        self.drops: list[AnyTicket] = []
        self.outcomes: list[Outcome] = []

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        assert claim_id not in self.claims, "claimed twice"
        self.claims[claim_id] = ticket

    def has_blocks(self, claim_id: int, ticket: AnyTicket) -> None:
        self.reserved.append(claim_id)

    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        self.drops.append(ticket)

    def finish(self, claim_id: int, ticket: AnyTicket) -> None: ...

    def take_outcomes(self) -> list[Outcome]:
        taken, self.outcomes = self.outcomes, []
        return taken


class Decoder:
    """A ``Consumer`` of one group that may ask metaservers, with what surrounds it."""

    def __init__(self, clock: FakeClock, poster: Any = None) -> None:
        self.clock = clock
        self.poster = poster or RecordingPoster()
        self.control = RecordingControl()
        self.stats = TransferStats()
        self.table = SummonsTable(
            CONFIG,
            self.poster,
            self.control,
            lambda request_id, transfer_id: {"request": request_id, "transfer": transfer_id},
            clock,
        )
        self.consumer = Consumer(CONFIG, [16], self.control, clock, self.stats, (), self.table)

    def admit(self, request_id: str = "cmpl-a-0-0123abcd", url: object = URL, **more: Any) -> Any:
        params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url, **more}
        request = make_request(request_id, PROMPT, params)
        self.consumer.on_new_request(request)
        return request

    def ask(self, request: Any) -> tuple[int | None, bool]:
        return self.consumer.num_matched_tokens(request, 0)

    def transfer_id(self) -> str:
        return list(self.poster.posts)[-1]

    def knock(self, port: int = 7100, host: str = "127.0.0.1", transfer_id: str = "") -> None:
        message = Knock(transfer_id=transfer_id or self.transfer_id(), host=host, port=port)
        self.table.on_knock(message)

    def answer(self, failure: str = "") -> None:
        self.poster.posts[self.transfer_id()](failure)

    def failures(self) -> dict[str, int]:
        stats = self.stats.take()
        return {} if stats is None else stats.data["failures"]


@pytest.fixture
def decoder(clock: FakeClock) -> Decoder:
    return Decoder(clock)


class TestAsking:
    def test_the_post_goes_out_when_the_request_comes_and_once(self, decoder: Decoder) -> None:
        request = decoder.admit()
        for _ in range(3):
            assert decoder.ask(request) == (None, False)
        assert decoder.poster.urls == [URL]
        assert decoder.control.claims == {}

    def test_each_request_has_a_transfer_id_of_its_own(self, decoder: Decoder) -> None:
        decoder.admit("a")
        decoder.admit("b")
        first, second = decoder.poster.posts
        assert first != second
        assert min(len(first), len(second)) == 32

    def test_a_knock_is_followed_as_a_named_p_would_be(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.knock(7100)
        assert decoder.ask(request) == (None, False)
        ((claim_id, ticket),) = decoder.control.claims.items()
        assert isinstance(ticket, Appointment)
        assert ticket.address == ("127.0.0.1", 7100)
        assert (ticket.transfer_id, ticket.num_tokens) == (decoder.transfer_id(), 40)
        decoder.control.outcomes.append(Invited(claim_id, 5, ()))
        assert decoder.ask(request) == (39, True)
        decoder.consumer.on_allocated(request.request_id, [[21, 22, 23]], 39)
        step = StepMessage()
        decoder.consumer.fill(step)
        (job,) = step.jobs
        assert isinstance(job, ReceiveJob)
        assert job.control_address == ("127.0.0.1", 7100)
        assert decoder.control.reserved == [claim_id]

    def test_after_a_knock_p_has_the_time_of_a_first_contact(
        self, decoder: Decoder, clock: FakeClock
    ) -> None:
        request = decoder.admit()
        clock.advance(CONFIG.metaserver_timeout_s - 1)
        decoder.knock()
        assert decoder.ask(request) == (None, False)
        clock.advance(CONFIG.first_contact_timeout_s - 0.1)
        assert decoder.ask(request) == (None, False)
        clock.advance(0.2)
        assert decoder.ask(request) == (0, False)
        assert decoder.failures() == {"announce": 1}
        assert [ticket.address for ticket in decoder.control.drops] == [("127.0.0.1", 7100)]

    def test_the_same_knock_again_changes_nothing(self, decoder: Decoder) -> None:
        request = decoder.admit()
        for _ in range(3):
            decoder.knock()
            assert decoder.ask(request) == (None, False)
        assert len(decoder.control.claims) == 1
        assert decoder.control.drops == []

    def test_a_second_p_is_sent_away(self, decoder: Decoder) -> None:
        """The proxy may try another one; only the first is waited for."""
        request = decoder.admit()
        decoder.knock(7100)
        decoder.ask(request)
        decoder.knock(7200)
        decoder.ask(request)
        assert [ticket.address for ticket in decoder.control.drops] == [("127.0.0.1", 7200)]
        assert len(decoder.control.claims) == 1

    def test_params_of_a_finished_prefill_come_before_a_metaserver(self, decoder: Decoder) -> None:
        decoder.admit(llmdd={"v": 1})
        assert decoder.poster.urls == []
        assert decoder.failures() == {"params": 1}


class TestRefused:
    @pytest.mark.parametrize(
        "url",
        ["http://10.0.0.1/", "http://proxy.example/", "file:///x", 7, "", "x" * 600, "http://a\n"],
    )
    def test_a_url_that_may_not_be_asked_is_a_local_prefill(
        self, decoder: Decoder, url: object
    ) -> None:
        request = decoder.admit(url=url)
        assert decoder.ask(request) == (0, False)
        assert decoder.poster.urls == []
        assert decoder.failures() == {"params": 1}

    def test_one_of_several_choices_is_prefilled_locally(
        self, decoder: Decoder, caplog: pytest.LogCaptureFixture
    ) -> None:
        logger = logging.getLogger("vllm.vllm_llmdd_connector.scheduler.consumer")
        logger.addHandler(caplog.handler)
        try:
            request = decoder.admit("1_cmpl-a-0-0123abcd")
        finally:
            logger.removeHandler(caplog.handler)
        assert decoder.ask(request) == (0, False)
        assert decoder.poster.urls == []
        assert decoder.failures() == {"params": 1}
        assert "prefilled locally: one of several choices (n > 1)" in caplog.text

    def test_a_prompt_of_embeddings_is_prefilled_locally(self, decoder: Decoder) -> None:
        params = {"do_remote_prefill": True, "metaserver": URL}
        request = make_request("r", PROMPT, params, prompt_embeds=object())
        decoder.consumer.on_new_request(request)
        assert decoder.ask(request) == (0, False)
        assert decoder.poster.urls == []

    def test_a_request_that_the_frontend_refused_asks_nobody(self, decoder: Decoder) -> None:
        params = {"do_remote_prefill": True, "metaserver": URL}
        request = make_request("r", PROMPT, params, abort_immediately=True)
        decoder.consumer.on_new_request(request)
        decoder.consumer.request_finished(request)
        assert decoder.poster.urls == []
        assert decoder.control.drops == []


class TestFailure:
    def test_a_failed_post_is_a_local_prefill_at_once(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.answer("it answered 500")
        assert decoder.ask(request) == (0, False)
        assert decoder.failures() == {"metaserver": 1}
        assert decoder.control.drops == []

    def test_a_failed_post_after_the_knock_drops_the_claim(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.knock()
        assert decoder.ask(request) == (None, False)
        decoder.answer("it answered 502")
        assert decoder.ask(request) == (0, False)
        assert decoder.failures() == {"metaserver": 1}
        assert [ticket.address for ticket in decoder.control.drops] == [("127.0.0.1", 7100)]

    def test_once_there_are_blocks_p_alone_decides(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.knock()
        decoder.ask(request)
        (claim_id,) = decoder.control.claims
        decoder.control.outcomes.append(Invited(claim_id, 5, ()))
        decoder.ask(request)
        decoder.consumer.on_allocated(request.request_id, [[21, 22, 23]], 39)
        decoder.answer("the proxy has died")
        step = StepMessage()
        decoder.consumer.fill(step)
        assert (len(step.jobs), step.cancels) == (1, {})
        assert decoder.failures() == {}

    def test_nobody_knocks_in_time(self, decoder: Decoder, clock: FakeClock) -> None:
        request = decoder.admit()
        clock.advance(CONFIG.metaserver_timeout_s - 0.1)
        assert decoder.ask(request) == (None, False)
        clock.advance(0.2)
        assert decoder.ask(request) == (0, False)
        assert decoder.failures() == {"metaserver": 1}
        assert decoder.poster.cancelled == [decoder.transfer_id()]

    def test_a_p_that_finished_without_a_knock_is_not_waited_for_long(
        self, decoder: Decoder, clock: FakeClock
    ) -> None:
        """One that is of another kind, or that may not dial this D."""
        request = decoder.admit()
        decoder.answer()
        assert decoder.ask(request) == (None, False)
        clock.advance(CONFIG.first_contact_timeout_s + 0.1)
        assert decoder.ask(request) == (0, False)
        assert decoder.failures() == {"metaserver": 1}

    def test_a_knock_from_a_foreign_address_is_not_followed(
        self, decoder: Decoder, clock: FakeClock
    ) -> None:
        request = decoder.admit()
        decoder.knock(host="10.0.0.1")
        assert decoder.ask(request) == (None, False)
        decoder.knock(7100)
        assert decoder.ask(request) == (None, False)
        assert [t.address for t in decoder.control.claims.values()] == [("127.0.0.1", 7100)]

    def test_a_knock_for_an_unknown_transfer_dials_nobody(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.knock(transfer_id="guessed")
        assert decoder.ask(request) == (None, False)
        assert (decoder.control.claims, decoder.control.drops) == ({}, [])


class TestEnd:
    def test_an_abort_closes_the_post(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.consumer.request_finished(request)
        assert decoder.poster.cancelled == [decoder.transfer_id()]
        assert decoder.control.drops == []

    @pytest.mark.parametrize("times", [1, 2])
    def test_a_p_that_knocks_too_late_is_told_that_nobody_waits(
        self, decoder: Decoder, times: int
    ) -> None:
        """Otherwise it would hold the blocks until their lease ends."""
        request = decoder.admit()
        decoder.consumer.request_finished(request)
        for _ in range(times):
            decoder.knock(7100)
        (ticket, *_) = decoder.control.drops
        assert len(decoder.control.drops) == times
        assert ticket.address == ("127.0.0.1", 7100)
        assert ticket.secret == decoder.transfer_id()

    def test_a_late_knock_from_a_foreign_address_is_not_answered(self, decoder: Decoder) -> None:
        decoder.consumer.request_finished(decoder.admit())
        decoder.knock(host="10.0.0.1")
        assert decoder.control.drops == []

    def test_an_answer_after_the_end_is_nothing(self, decoder: Decoder) -> None:
        decoder.consumer.request_finished(decoder.admit())
        decoder.answer("late")
        assert decoder.ask(decoder.admit("other")) == (None, False)
        assert decoder.failures() == {}

    def test_only_so_many_ended_transfers_are_remembered(self, decoder: Decoder) -> None:
        for number in range(MAX_ENDED + 1):
            decoder.consumer.request_finished(decoder.admit(f"r{number}"))
        first, second = list(decoder.poster.posts)[:2]
        decoder.knock(transfer_id=first)
        assert decoder.control.drops == []
        decoder.knock(transfer_id=second)
        assert len(decoder.control.drops) == 1


class TestRealMetaserver:
    """The same with HTTP between: what the metaserver does decides how soon D goes on."""

    @pytest.fixture
    def real(self, clock: FakeClock) -> Iterator[Decoder]:
        client = MetaserverClient(Deadlines(first_contact_timeout_s=20.0))
        yield Decoder(clock, client)
        client.close()

    def test_down(self, real: Decoder) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self._goes_on(real, real.admit(url=f"http://127.0.0.1:{port}/"))

    @pytest.mark.parametrize("status", [302, 404, 500, 502])
    def test_an_answer_that_is_no_success(self, real: Decoder, status: int) -> None:
        with serving() as metaserver:
            metaserver.status = status
            metaserver.headers = {"Location": "http://127.0.0.1:1/"}
            self._goes_on(real, real.admit(url=metaserver.url))

    def test_slow(self, real: Decoder, clock: FakeClock) -> None:
        with serving() as metaserver:
            metaserver.hold = True
            request = real.admit(url=metaserver.url)
            wait_for(lambda: metaserver.bodies, "the post")
            assert real.ask(request) == (None, False)
            clock.advance(CONFIG.metaserver_timeout_s + 1)
            assert real.ask(request) == (0, False)
            assert real.failures() == {"metaserver": 1}
            wait_for(lambda: metaserver.num_left == 1, "the end of the post")

    def test_a_p_knocks_while_the_post_is_open(self, real: Decoder) -> None:
        with serving() as metaserver:
            metaserver.hold = True
            request = real.admit(url=metaserver.url)
            wait_for(lambda: metaserver.bodies, "the post")
            real.knock(transfer_id=metaserver.bodies[0]["transfer"])
            assert real.ask(request) == (None, False)
            assert len(real.control.claims) == 1

    @staticmethod
    def _goes_on(real: Decoder, request: Any) -> None:
        wait_for(lambda: real.ask(request) == (0, False), "the local prefill")
        assert real.failures() == {"metaserver": 1}
