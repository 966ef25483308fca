"""``Consumer`` of prompts that P has still to compute: invited, granted instead, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes.builders import concurrent_params, decode_params, make_appointment, make_endpoint
from fakes.clock import FakeClock
from fakes.decoder import BLOCKS, FIRST_CONTACT_S, PROMPT, Decoder
from fakes.requests import make_request

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.layout.blocks import WantedBlocks
from vllm_llmdd_connector.metadata import PullJob, ReceiveJob
from vllm_llmdd_connector.params import Ticket

RESERVE_S = ConnectorConfig().reserve_timeout_s


@pytest.fixture
def decoder(clock: FakeClock) -> Decoder:
    return Decoder(clock)


def invited(decoder: Decoder) -> Any:
    request = decoder.announced()
    decoder.control.invite(decoder.control.last_claim)
    assert decoder.ask(request) == (39, True)
    return request


def receiving(decoder: Decoder) -> Any:
    request = invited(decoder)
    decoder.consumer.on_allocated("r", BLOCKS, 39)
    assert len(decoder.step().jobs) == 1
    return request


class TestInvited:
    def test_appointment_is_made_with_d_s_own_prompt(self, decoder: Decoder) -> None:
        request = decoder.announced()
        assert decoder.ask(request) == (None, False)
        assert list(decoder.control.claims.values()) == [make_appointment(PROMPT)]

    def test_allocation_orders_the_reservation_and_tells_p_of_the_blocks(
        self, decoder: Decoder
    ) -> None:
        request = invited(decoder)
        assert decoder.control.with_blocks == []
        assert decoder.ask(request, 16) == (23, True)
        decoder.consumer.on_allocated("r", BLOCKS, 23)
        (job,) = decoder.step().jobs
        assert job == ReceiveJob(
            request_id="r",
            transfer_id="transfer",
            claim_id=decoder.control.last_claim,
            control_address=("127.0.0.1", 4000),
            session=5,
            workers=(make_endpoint(),),
            groups=[WantedBlocks([22, 23], 1)],
            loaded_blocks=[22, 23],
            timeout_s=decoder.config.request_timeout_s,
        )
        assert decoder.control.with_blocks == [decoder.control.last_claim]
        assert decoder.step().is_empty

    def test_received_request_finishes_its_claim(self, decoder: Decoder) -> None:
        request = receiving(decoder)
        decoder.consumer.on_received({"r"})
        assert decoder.control.finished == [decoder.control.last_claim]
        assert decoder.ask(request) == (0, False)

    def test_failed_request_is_dropped_and_computed_locally(self, decoder: Decoder) -> None:
        request = receiving(decoder)
        decoder.consumer.on_failed({"r": "push: torn"})
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.ask(request) == (0, False)

    def test_second_invitation_changes_nothing(self, decoder: Decoder) -> None:
        """P answers the second announcement too."""
        request = receiving(decoder)
        decoder.control.invite(decoder.control.last_claim)
        assert decoder.step().is_empty
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.control.drops == []
        decoder.consumer.on_received({"r"})
        assert decoder.ask(request) == (0, False)

    def test_full_local_hit_gives_the_appointment_up(self, decoder: Decoder) -> None:
        request = invited(decoder)
        assert decoder.ask(request, 39) == (0, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.control.with_blocks == []

    def test_table_that_does_not_fit_is_ordered_without_groups(self, decoder: Decoder) -> None:
        """The workers report such an order as failed; an exception here would end the engine."""
        invited(decoder)
        decoder.consumer.on_allocated("r", [[21]], 39)
        (job,) = decoder.step().jobs
        assert job.groups == []

    def test_invitation_by_a_foreign_worker_is_dropped(self, decoder: Decoder) -> None:
        request = decoder.announced()
        claim_id = decoder.control.last_claim
        decoder.control.invite(claim_id, workers=(make_endpoint(host="10.9.9.9"),))
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [claim_id]
        assert decoder.figures()[1] == {"announce": 1}


class TestGrantedInstead:
    def test_p_that_was_faster_is_pulled_from(self, decoder: Decoder) -> None:
        request = decoder.announced()
        decoder.control.grant(decoder.control.last_claim)
        assert decoder.ask(request) == (39, True)
        decoder.consumer.on_allocated("r", BLOCKS, 39)
        (job,) = decoder.step().jobs
        assert isinstance(job, PullJob)
        assert (job.transfer_id, job.production) == ("transfer", 1)
        assert job.groups[0].src_blocks == [7, 8, 9]
        assert decoder.control.with_blocks == []

    def test_p_s_answer_of_the_sequential_flow_goes_before_the_transfer_id(
        self, decoder: Decoder
    ) -> None:
        """A proxy that sends both hands on P's answer, which is worth more."""
        params = {**decode_params(), "transfer_id": "transfer"}
        request = make_request("r", PROMPT, params)
        decoder.consumer.on_new_request(request)
        (ticket,) = decoder.control.claims.values()
        assert isinstance(ticket, Ticket)


class TestDeadline:
    def test_first_answer_is_awaited_as_long_as_any(self, decoder: Decoder) -> None:
        request = decoder.announced()
        decoder.clock.advance(FIRST_CONTACT_S - 0.001)
        assert decoder.ask(request) == (None, False)
        decoder.clock.advance(0.001)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.figures()[1] == {"announce": 1}

    def test_queued_request_waits_longer_but_not_for_ever(
        self, decoder: Decoder, log: list[str]
    ) -> None:
        request = decoder.announced()
        decoder.clock.advance(FIRST_CONTACT_S / 2)
        decoder.control.queue(decoder.control.last_claim)
        assert decoder.ask(request) == (None, False)
        decoder.clock.advance(RESERVE_S - 0.001)
        assert decoder.ask(request) == (None, False)
        decoder.clock.advance(0.001)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.figures()[1] == {"reserve": 1}
        assert "its turn at P did not come within 120 s (raise reserve_timeout_s)" in log[-1]

    def test_word_that_it_is_still_queued_prolongs_nothing(self, decoder: Decoder) -> None:
        """P answers each announcement, and a network may double an answer."""
        request = decoder.announced()
        for _ in range(2):
            decoder.control.queue(decoder.control.last_claim)
            assert decoder.ask(request) == (None, False)
            decoder.clock.advance(RESERVE_S / 2)
        assert decoder.ask(request) == (0, False)

    @pytest.mark.parametrize("was_queued", [False, True])
    def test_invited_request_waits_for_blocks_but_not_for_ever(
        self, decoder: Decoder, log: list[str], was_queued: bool
    ) -> None:
        """P may hold its prompt back until D has blocks; P's turn and they share one limit."""
        request = decoder.announced()
        waited_s = 0.0
        if was_queued:
            waited_s = RESERVE_S / 2
            decoder.control.queue(decoder.control.last_claim)
            decoder.ask(request)
            decoder.clock.advance(waited_s)
        decoder.control.invite(decoder.control.last_claim)
        assert decoder.ask(request) == (39, True)
        decoder.clock.advance(RESERVE_S - waited_s - 0.001)
        assert decoder.ask(request) == (39, True)
        decoder.clock.advance(0.001)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.figures()[1] == {"reserve": 1}
        assert "free blocks here did not come within 120 s (raise reserve_timeout_s)" in log[-1]
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.step().is_empty
        assert decoder.control.with_blocks == []

    def test_time_of_a_request_ends_that_vllm_does_not_ask_for(self, decoder: Decoder) -> None:
        """It asks for none behind the first that waits for blocks."""
        request = decoder.announced()
        decoder.control.invite(decoder.control.last_claim)
        assert decoder.ask(request) == (39, True)
        decoder.clock.advance(RESERVE_S)
        decoder.step()
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.figures()[1] == {"reserve": 1}
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]

    def test_reserved_request_has_the_limit_of_its_transfer_only(self, decoder: Decoder) -> None:
        request = receiving(decoder)
        decoder.clock.advance(2 * RESERVE_S)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == []
        assert "reserve" not in decoder.figures()[1]

    def test_granted_request_waits_for_blocks_as_long_as_p_holds_its_own(
        self, decoder: Decoder
    ) -> None:
        request = decoder.announced()
        decoder.control.queue(decoder.control.last_claim)
        assert decoder.ask(request) == (None, False)
        decoder.control.grant(decoder.control.last_claim)
        decoder.clock.advance(2 * RESERVE_S)
        assert decoder.ask(request) == (39, True)
        assert decoder.control.drops == []

    def test_queued_request_can_be_invited_and_granted(self, decoder: Decoder) -> None:
        first, second = decoder.announced("r1"), decoder.announced("r2")
        one, two = decoder.control.claims
        for claim_id in (one, two):
            decoder.control.queue(claim_id)
        decoder.clock.advance(2 * FIRST_CONTACT_S)
        decoder.control.invite(one)
        decoder.control.grant(two)
        assert decoder.ask(first) == (39, True)
        assert decoder.ask(second) == (39, True)

    def test_answer_after_the_deadline_is_for_nobody(self, decoder: Decoder) -> None:
        request = decoder.announced()
        decoder.clock.advance(FIRST_CONTACT_S)
        decoder.ask(request)
        decoder.control.queue(decoder.control.last_claim)
        decoder.control.invite(decoder.control.last_claim)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]


class TestRefused:
    @pytest.mark.parametrize("reach", [Decoder.announced, invited], ids=["claiming", "invited"])
    def test_refusal_before_the_allocation_is_prefilled_locally(
        self, decoder: Decoder, reach: Callable[[Decoder], Any]
    ) -> None:
        request = reach(decoder)
        decoder.control.refuse(decoder.control.last_claim, "claim", "the prompt differs")
        assert decoder.ask(request) == (0, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.step().is_empty
        assert decoder.figures()[1] == {"claim": 1}

    def test_refusal_while_receiving_cancels_the_reservation(self, decoder: Decoder) -> None:
        """Nobody would send any more; the request's deadline is far away."""
        receiving(decoder)
        decoder.control.refuse(decoder.control.last_claim, "claim", "P has aborted it")
        assert decoder.step().cancels == {"r": "claim: P has aborted it"}
        assert decoder.step().is_empty
        decoder.consumer.on_failed({"r": "push: claim: P has aborted it"})
        assert decoder.control.drops == [decoder.control.last_claim]

    def test_refusal_between_order_and_step_comes_with_the_order(self, decoder: Decoder) -> None:
        """The workers take orders before cancels."""
        invited(decoder)
        decoder.consumer.on_allocated("r", BLOCKS, 39)
        decoder.control.refuse(decoder.control.last_claim)
        step = decoder.step()
        assert len(step.jobs) == 1
        assert step.cancels == {"r": "claim: released"}

    def test_refusal_of_a_pull_is_left_to_its_release(self, decoder: Decoder) -> None:
        decoder.receiving()
        decoder.control.refuse(decoder.control.last_claim)
        assert decoder.step().cancels == {}

    def test_refusal_after_the_report_changes_nothing(self, decoder: Decoder) -> None:
        receiving(decoder)
        decoder.consumer.on_received({"r"})
        decoder.control.refuse(decoder.control.last_claim)
        decoder.announced("other")
        assert decoder.step().cancels == {}


class TestAbort:
    @pytest.mark.parametrize(
        ("reach", "cancels"),
        [(Decoder.announced, {}), (invited, {}), (receiving, {"r": ""})],
        ids=["claiming", "invited", "receiving"],
    )
    def test_abort_tells_p_and_if_needed_the_workers(
        self, decoder: Decoder, reach: Callable[[Decoder], Any], cancels: dict[str, str]
    ) -> None:
        decoder.consumer.request_finished(reach(decoder))
        assert decoder.control.dropped_tickets == [make_appointment(PROMPT)]
        assert decoder.step().cancels == cancels
        decoder.control.invite(decoder.control.last_claim)
        decoder.control.refuse(decoder.control.last_claim)
        assert decoder.step().is_empty

    def test_abort_after_a_refusal_is_an_abort(self, decoder: Decoder) -> None:
        """Its report is one that nobody reads, not a failure."""
        request = receiving(decoder)
        decoder.control.refuse(decoder.control.last_claim)
        decoder.announced("other")
        decoder.ask(make_request("other", PROMPT))
        decoder.consumer.request_finished(request)
        assert decoder.step().cancels == {"r": ""}

    def test_request_that_the_frontend_refused_is_told_to_p(self, decoder: Decoder) -> None:
        request = make_request("r", [0], concurrent_params(), abort_immediately=True)
        decoder.consumer.on_new_request(request)
        assert decoder.control.claims == {}
        decoder.consumer.request_finished(request)
        (ticket,) = decoder.control.dropped_tickets
        assert (ticket.transfer_id, ticket.address) == ("transfer", ("127.0.0.1", 4000))


class TestParams:
    @pytest.mark.parametrize(
        "changes",
        [
            {"transfer_id": ""},
            {"transfer_id": "x" * 513},
            {"transfer_id": 7},
            {"transfer_id": "a\nb"},
            {"remote_host": None},
            {"remote_host": "169.254.169.254"},
            {"remote_port": 0},
            {"remote_port": 65536},
            {"remote_port": True},
        ],
        ids=str,
    )
    def test_bad_params_are_prefilled_locally(
        self, decoder: Decoder, changes: dict[str, Any]
    ) -> None:
        request = decoder.announced(**changes)
        assert decoder.ask(request) == (0, False)
        decoder.consumer.request_finished(request)
        assert (decoder.control.claims, decoder.control.drops) == ({}, [])
        assert decoder.figures()[1] == {"params": 1}

    def test_prompt_of_embeddings_is_prefilled_locally(self, decoder: Decoder) -> None:
        request = make_request("r", None, concurrent_params(), prompt_embeds=object())
        decoder.consumer.on_new_request(request)
        assert decoder.ask(request) == (0, False)
        assert decoder.figures()[1] == {"params": 1}
