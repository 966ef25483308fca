"""``Consumer``: every transition of a request at D, and what each tells P and the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes.builders import decode_params, make_endpoint, make_ticket
from fakes.clock import FakeClock
from fakes.decoder import BLOCKS, FIRST_CONTACT_S, PROMPT, Decoder
from fakes.requests import make_request


@pytest.fixture
def decoder(clock: FakeClock) -> Decoder:
    return Decoder(clock)


class TestClaiming:
    def test_new_request_is_claimed_once_however_often_vllm_asks(self, decoder: Decoder) -> None:
        request = decoder.admit()
        for _ in range(3):
            assert decoder.ask(request) == (None, False)
        (claim_id,) = decoder.control.claims
        assert decoder.control.claims[claim_id] == make_ticket(PROMPT)
        assert decoder.control.claim_deadlines[claim_id] == decoder.clock() + FIRST_CONTACT_S

    def test_request_without_on_new_request_is_claimed_when_first_asked_for(
        self, decoder: Decoder
    ) -> None:
        request = make_request("r", PROMPT, decode_params(make_ticket(PROMPT)))
        assert decoder.ask(request) == (None, False)
        assert len(decoder.control.claims) == 1

    def test_grant_matches_all_tokens_behind_the_local_hit(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.control.grant(decoder.control.last_claim)
        assert decoder.ask(request, 16) == (23, True)
        assert decoder.ask(request, 0) == (39, True)

    def test_refusal_is_prefilled_locally_and_counted_by_stage(self, decoder: Decoder) -> None:
        request = decoder.admit()
        decoder.control.refuse(decoder.control.last_claim, "handshake", "dtype differs")
        assert decoder.ask(request) == (0, False)
        assert decoder.figures()[1] == {"handshake": 1}
        assert decoder.control.drops == []

    def test_no_answer_in_time_is_prefilled_locally_and_dropped(self, decoder: Decoder) -> None:
        """A grant that came just too late was renewed for nobody until P's bound."""
        request = decoder.admit()
        decoder.clock.advance(FIRST_CONTACT_S)
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [decoder.control.last_claim]
        decoder.control.grant(decoder.control.last_claim)
        assert decoder.ask(request) == (0, False)
        assert decoder.figures()[1] == {"claim": 1}

    def test_grant_that_names_a_foreign_worker_is_dropped(self, decoder: Decoder) -> None:
        request = decoder.admit()
        claim_id = decoder.control.last_claim
        decoder.control.grant(claim_id, workers=(make_endpoint(host="10.9.9.9"),))
        assert decoder.ask(request) == (0, False)
        assert decoder.control.drops == [claim_id]
        assert decoder.figures()[1] == {"claim": 1}

    def test_outcome_of_one_request_is_kept_when_another_one_is_asked_for(
        self, decoder: Decoder
    ) -> None:
        first = decoder.admit("first")
        decoder.control.grant(decoder.control.last_claim)
        second = decoder.admit("second")
        assert decoder.ask(second) == (None, False)
        assert decoder.ask(first) == (39, True)

    def test_allocation_before_the_answer_gives_the_claim_up(self, decoder: Decoder) -> None:
        """Requests for prompt logprobs: vLLM takes None for 0 and computes the whole prompt."""
        request = decoder.admit()
        assert decoder.ask(request) == (None, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.control.drops == [decoder.control.last_claim]
        decoder.control.grant(decoder.control.last_claim)
        assert decoder.ask(request) == (0, False)
        assert decoder.step().is_empty
        assert decoder.figures()[0] == {"recv_not_needed": 1}


class TestMatched:
    def test_allocation_orders_the_pull_of_what_is_not_there(self, decoder: Decoder) -> None:
        request = decoder.matched()
        assert decoder.ask(request, 16) == (23, True)
        decoder.consumer.on_allocated("r", BLOCKS, 24)
        job = decoder.pull()
        assert (job.request_id, job.transfer_id, job.production) == ("r", "cmpl-p", 1)
        assert job.claim_id == decoder.control.last_claim
        assert job.workers == (make_endpoint(),)
        assert (job.control_address, job.session) == (("127.0.0.1", 4000), 5)
        (group,) = job.groups
        assert (group.src_blocks, group.dst_blocks, group.first_position) == ([8, 9], [22, 23], 1)
        assert job.loaded_blocks == [22, 23]
        assert job.timeout_s == decoder.config.request_timeout_s
        assert decoder.step().is_empty

    def test_full_local_hit_gives_the_claim_up(self, decoder: Decoder) -> None:
        request = decoder.matched()
        assert decoder.ask(request, 39) == (0, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.figures()[0] == {"recv_not_needed": 1}
        assert decoder.step().is_empty

    def test_lease_gone_before_allocation_is_prefilled_locally(self, decoder: Decoder) -> None:
        request = decoder.matched()
        decoder.control.refuse(decoder.control.last_claim)
        assert decoder.ask(request) == (0, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.step().is_empty

    def test_tables_that_do_not_fit_are_ordered_without_groups(self, decoder: Decoder) -> None:
        """The workers report such an order as failed; an exception here would end the engine."""
        request = decoder.admit()
        decoder.control.grant(decoder.control.last_claim, block_ids=((7,),))
        assert decoder.ask(request) == (39, True)
        decoder.consumer.on_allocated("r", BLOCKS, 40)
        job = decoder.pull()
        assert job.groups == []
        assert job.loaded_blocks == [21, 22, 23]


class TestReceiving:
    def test_received_request_finishes_its_claim_and_asks_no_more(self, decoder: Decoder) -> None:
        request = decoder.receiving()
        decoder.consumer.on_received({"r"})
        assert decoder.control.finished == [decoder.control.last_claim]
        assert decoder.ask(request) == (0, False)
        decoder.consumer.on_allocated("r", BLOCKS, 0)
        assert decoder.step().is_empty
        assert decoder.control.drops == []

    def test_request_preempted_after_its_load_does_not_ask_again(self, decoder: Decoder) -> None:
        request = decoder.receiving()
        decoder.consumer.on_received({"r"})
        assert decoder.ask(request, 16) == (0, False)
        assert len(decoder.control.claims) == 1

    def test_failed_request_drops_its_claim_and_is_computed_locally(self, decoder: Decoder) -> None:
        request = decoder.receiving()
        decoder.consumer.on_failed({"r": "transfer: torn"})
        decoder.consumer.on_received({"r"})
        assert decoder.control.drops == [decoder.control.last_claim]
        assert decoder.control.finished == []
        assert decoder.ask(request) == (0, False)

    def test_lease_gone_while_receiving_is_left_to_the_workers(self, decoder: Decoder) -> None:
        request = decoder.receiving()
        decoder.control.refuse(decoder.control.last_claim)
        other = decoder.admit("other")
        decoder.ask(other)
        decoder.consumer.on_failed({"r": "release: gone"})
        assert decoder.ask(request) == (0, False)

    def test_reports_of_unknown_requests_are_ignored(self, decoder: Decoder) -> None:
        decoder.consumer.on_received({"stranger"})
        decoder.consumer.on_failed({"stranger": "x"})
        assert decoder.control.drops == decoder.control.finished == []


class TestAbort:
    @pytest.mark.parametrize(
        ("reach", "is_dropped", "is_cancelled"),
        [
            (Decoder.admit, True, False),
            (Decoder.matched, True, False),
            (Decoder.receiving, True, True),
        ],
        ids=["claiming", "matched", "receiving"],
    )
    def test_abort_tells_p_and_if_needed_the_workers(
        self,
        decoder: Decoder,
        reach: Callable[[Decoder], Any],
        is_dropped: bool,
        is_cancelled: bool,
    ) -> None:
        request = reach(decoder)
        decoder.consumer.request_finished(request)
        assert (decoder.control.drops == [decoder.control.last_claim]) is is_dropped
        assert decoder.step().cancels == ({"r": ""} if is_cancelled else {})
        # What comes afterwards finds nothing.
        decoder.control.grant(decoder.control.last_claim)
        decoder.consumer.on_received({"r"})
        assert decoder.step().is_empty
        assert decoder.control.finished == []

    def test_normal_end_after_the_load_tells_nobody(self, decoder: Decoder) -> None:
        request = decoder.receiving()
        decoder.consumer.on_received({"r"})
        decoder.consumer.request_finished(request)
        assert decoder.control.drops == []
        assert decoder.step().is_empty

    @pytest.mark.parametrize("is_failed", [True, False])
    def test_end_of_a_local_prefill_tells_nobody_again(
        self, decoder: Decoder, is_failed: bool
    ) -> None:
        request = decoder.receiving() if is_failed else decoder.admit()
        if is_failed:
            decoder.consumer.on_failed({"r": "torn"})
        else:
            decoder.control.refuse(decoder.control.last_claim)
            decoder.ask(request)
        told = list(decoder.control.drops)
        decoder.consumer.request_finished(request)
        assert decoder.control.drops == told
        assert decoder.step().is_empty


class TestParams:
    def local(self, decoder: Decoder, request: Any) -> None:
        """The request is prefilled here and P hears nothing; vLLM may ask twice."""
        decoder.consumer.on_new_request(request)
        assert decoder.ask(request) == (0, False)
        decoder.consumer.on_allocated(request.request_id, BLOCKS, 0)
        decoder.consumer.request_finished(request)
        assert decoder.control.claims == {}
        assert decoder.control.drops == []
        assert decoder.figures()[1] == {"params": 1}

    def test_other_prompt_of_a_list_is_prefilled_locally(self, decoder: Decoder) -> None:
        """vLLM gives every prompt of a list the first one's params."""
        params = decode_params(make_ticket(PROMPT))
        self.local(decoder, make_request("r", [*PROMPT[:-1], 7], params))

    def test_longer_prompt_is_prefilled_locally(self, decoder: Decoder) -> None:
        params = decode_params(make_ticket(PROMPT))
        self.local(decoder, make_request("r", [*PROMPT, 7], params))

    def test_same_tokens_with_another_adapter_are_prefilled_locally(self, decoder: Decoder) -> None:
        params = decode_params(make_ticket(PROMPT))
        self.local(decoder, make_request("r", PROMPT, params, lora_name="other"))

    def test_malformed_params_are_prefilled_locally(self, decoder: Decoder) -> None:
        self.local(decoder, make_request("r", PROMPT, {"do_remote_prefill": True}))

    def test_peer_outside_the_allow_list_is_never_contacted(self, decoder: Decoder) -> None:
        params = decode_params(make_ticket(PROMPT, host="169.254.169.254"))
        self.local(decoder, make_request("r", PROMPT, params))

    @pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}])
    def test_plain_request_is_no_failure(self, decoder: Decoder, params: Any) -> None:
        request = make_request("r", PROMPT, params)
        decoder.consumer.on_new_request(request)
        assert decoder.ask(request) == (0, False)
        decoder.consumer.request_finished(request)
        assert decoder.figures() == ({}, {})

    def test_children_of_one_request_claim_each_for_itself(self, decoder: Decoder) -> None:
        for name in ("0_r", "1_r"):
            decoder.admit(name)
        assert len(decoder.control.claims) == 2
        assert len(set(decoder.control.claims.values())) == 1


class TestRejectedByFrontend:
    """vLLM adds such a request only to abort it at once, with a placeholder for a prompt."""

    def test_p_is_told_that_nothing_is_needed(self, decoder: Decoder) -> None:
        params = decode_params(make_ticket(PROMPT))
        request = make_request("r", [0], params, abort_immediately=True)
        decoder.consumer.on_new_request(request)
        assert decoder.control.claims == {}
        decoder.consumer.request_finished(request)
        assert decoder.control.dropped_tickets == [make_ticket(PROMPT)]

    @pytest.mark.parametrize("change", [{"host": "10.0.0.9"}, {"secret": ""}])
    def test_bad_ticket_is_told_to_nobody(self, decoder: Decoder, change: dict[str, Any]) -> None:
        params = decode_params(make_ticket(PROMPT, **change))
        request = make_request("r", [0], params, abort_immediately=True)
        decoder.consumer.on_new_request(request)
        decoder.consumer.request_finished(request)
        assert decoder.control.drops == []
