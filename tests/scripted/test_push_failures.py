"""What can go wrong between the announcement and Done; D's request ends as the policy says."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from fakes.clock import FakeClock, wait_for
from fakes.fake_datadist import LLMStatusCode
from harness import Result
from pairs import MakePair, Pair, counts, prompt_of
from test_push_layers import FIRST

POLICIES = ["recompute", "fail"]


def assert_failed_by_policy(pair: Pair, prompt: list[int], result: Result) -> None:
    """Recompute gives the right tokens, fail gives an error and not one token."""
    if pair.d.spec.load_failure_policy == "recompute":
        assert pair.is_right(prompt, result)
    else:
        assert (result.finish_reason, result.tokens) == ("error", [])


def start_queued(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    """Both legs, as far as D knows that P has the request; returns D's and P's.

    P takes no step: its turn has not come.
    """
    transfer_id = pair.new_transfer(prompt)
    request_id = pair.push_d(prompt, transfer_id)
    at_p = pair.push_p(prompt, transfer_id)
    pair.d.run_until(lambda: is_queued(pair, request_id))
    return request_id, at_p


def is_queued(pair: Pair, request_id: str) -> bool:
    """Whether P has said that it has the request."""
    return bool(entry_of(pair, request_id).limit == "reserve_timeout_s")


def is_invited(pair: Pair, request_id: str) -> bool:
    return entry_of(pair, request_id).offer is not None


def entry_of(pair: Pair, request_id: str) -> Any:
    """What D's scheduler side knows of a request."""
    return pair.d.connector._scheduler._consumer._requests[request_id]


@pytest.mark.parametrize("policy", POLICIES)
class TestPushFails:
    @pytest.mark.parametrize("at_layer", [0, 3])
    @pytest.mark.parametrize("status", [LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_FAILED])
    def test_at_a_layer(
        self, make_pair: MakePair, policy: str, at_layer: int, status: LLMStatusCode
    ) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        faults = pair.push_faults()
        faults.status, faults.at_layer = status, at_layer
        prompt = prompt_of(70)
        assert_failed_by_policy(pair, prompt, pair.run(pair.push(prompt))[0])
        assert len(pair.journal.failures) == 1
        pair.finish()
        assert counts(pair.d)["failed at push"] == 1
        assert counts(pair.p)["failed at push"] == 1

    @pytest.mark.parametrize("rank", [0, 1])
    def test_on_one_rank_of_two(self, make_pair: MakePair, policy: str, rank: int) -> None:
        """The other one may still wait for a chunk that P has not computed."""
        pair = make_pair(
            tp_size=2, p={"max_num_batched_tokens": 32}, d={"load_failure_policy": policy}
        )
        pair.push_faults(rank).status = LLMStatusCode.LLM_FAILED
        prompt = prompt_of(90)
        request_id = pair.push_after_announcement(prompt)
        pair.p.step()
        pair.step_d_until_reserved(FIRST)
        pair.d.run_until(lambda: "failed at push" in counts(pair.d))
        assert_failed_by_policy(pair, prompt, pair.run(request_id)[0])
        pair.finish()

    def test_the_next_request_is_pushed_again(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        faults = pair.push_faults()
        faults.status, faults.num_failures = LLMStatusCode.LLM_TIMEOUT, 1
        prompts = [prompt_of(70, seed) for seed in range(3)]
        results = [pair.run(pair.push(prompt))[0] for prompt in prompts]
        right = [pair.is_right(p, r) for p, r in zip(prompts, results, strict=True)]
        assert right.count(False) == (policy == "fail")
        assert len(pair.journal.dones) == 2
        pair.finish()

    def test_only_the_failed_one_of_several_at_once(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(num_blocks=200, d={"load_failure_policy": policy})
        faults = pair.push_faults()
        faults.status, faults.num_failures, faults.at_layer = LLMStatusCode.LLM_PARAM_INVALID, 1, 2
        prompts = [prompt_of(60, seed) for seed in range(4)]
        ids = [pair.push(prompt) for prompt in prompts]
        results = pair.run(*ids)
        right = [pair.is_right(p, r) for p, r in zip(prompts, results, strict=True)]
        assert right.count(False) == (policy == "fail")
        pair.finish()

    def test_the_link_fails(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        pair.network.faults(pair.producers[0]).num_link_failures = 2
        prompt = prompt_of(70)
        assert_failed_by_policy(pair, prompt, pair.run(pair.push(prompt))[0])
        pair.finish()
        assert counts(pair.d)["failed at link"] == 1

    def test_d_s_own_deadline_ends_a_push_that_hangs(
        self, make_pair: MakePair, policy: str
    ) -> None:
        """Its blocks serve the next request at once; what P still has under way changes no byte."""
        pair = make_pair(
            d={
                "load_failure_policy": policy,
                "enable_prefix_caching": False,
                "num_blocks": 8,
                "max_model_len": 100,
                "extra_config": {"request_timeout_s": 0.3},
            }
        )
        faults = pair.push_faults()
        faults.gate = threading.Event()
        prompt, local = prompt_of(90), prompt_of(85, 2)
        result = pair.run(pair.push(prompt))[0]
        assert_failed_by_policy(pair, prompt, result)
        next_owner = pair.decode(local, None, max_tokens=5)
        pair.d.run_until(lambda: len(pair.d.results[next_owner].tokens) >= 2)
        faults.gate.set()
        assert pair.is_right(local, pair.run(next_owner)[0])
        assert pair.journal.dones == []
        pair.finish()


class TestNobodyComes:
    def test_d_never(self, make_pair: MakePair) -> None:
        """P's lease ends by its own deadline."""
        pair = make_pair()
        prompt = prompt_of(70)
        pair.p.run(pair.push_p(prompt, pair.new_transfer(prompt)))
        assert pair.p.initial_free_blocks - pair.p.free_blocks() == 5
        pair.p_clock.advance(29)
        assert pair.p.initial_free_blocks - pair.p.free_blocks() == 5
        pair.p_clock.advance(2)
        pair.finish()
        assert counts(pair.p)["leases_expired"] == 1

    def test_p_never(self, make_pair: MakePair) -> None:
        """D prefills by itself after its deadline, and P forgets the announcement."""
        clock = FakeClock()
        pair = make_pair(d_clock=clock)
        prompt = prompt_of(70)
        transfer_id = pair.new_transfer(prompt)
        request_id = pair.push_d(prompt, transfer_id)
        pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
        for _ in range(10):
            pair.d.step()
        assert pair.status(request_id) == "WAITING"
        clock.advance(5.1)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        pair.finish()
        assert counts(pair.d)["failed at announce"] == 1

    def test_p_comes_after_d_has_given_up(self, make_pair: MakePair) -> None:
        clock = FakeClock()
        pair = make_pair(d_clock=clock)
        prompt = prompt_of(70)
        transfer_id = pair.new_transfer(prompt)
        request_id = pair.push_d(prompt, transfer_id)
        pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
        clock.advance(5.1)
        pair.run(request_id)
        pair.run_until(lambda: not len(pair.handovers))
        pair.p.run(pair.push_p(prompt, transfer_id))
        pair.p_clock.advance(31)
        pair.finish()
        assert pair.network.pushes == []

    def test_p_s_turn_never(self, make_pair: MakePair) -> None:
        """P has the request and works on others. D ends its wait by itself; P then computes for
        nobody and holds nothing."""
        clock = FakeClock()
        pair = make_pair(d_clock=clock)
        prompt = prompt_of(70)
        request_id, at_p = start_queued(pair, prompt)
        clock.advance(119)
        pair.d.step()
        assert pair.status(request_id) == "WAITING"
        clock.advance(1.1)
        assert pair.is_right(prompt, pair.d.run(request_id)[0])
        pair.d.drain()
        pair.p.run(at_p)
        pair.finish()
        assert counts(pair.d)["failed at reserve"] == 1
        assert counts(pair.p).get("leases_expired", 0) == 0
        assert pair.network.pushes == []

    def test_p_s_turn_too_late_for_one_d_request_of_two(self, make_pair: MakePair) -> None:
        """P keeps the prompt for the other one, which came later."""
        clock = FakeClock()
        pair = make_pair(d_clock=clock)
        prompt = prompt_of(70)
        first, at_p = start_queued(pair, prompt)
        clock.advance(60)
        second = pair.push_d(prompt, FIRST)
        pair.d.run_until(lambda: is_queued(pair, second))
        clock.advance(61)
        assert pair.is_right(prompt, pair.d.run(first)[0])
        pair.run_until(lambda: len(pair.handovers.of_request(at_p).suitors) == 1)
        assert pair.is_right(prompt, pair.run(second)[0])
        pair.finish()
        assert counts(pair.d)["failed at reserve"] == 1
        assert counts(pair.p)["leases_released"] == 1

    def test_blocks_at_d_never(self, make_pair: MakePair) -> None:
        """D's cache is full of a long answer. P, which has computed the prompt, is told."""
        clock = FakeClock()
        pair = make_pair(d_clock=clock, d={"num_blocks": 10, "max_model_len": 144})
        local, prompt = prompt_of(60, 2), prompt_of(70)
        long = pair.decode(local, None, max_tokens=60)
        pair.d.run_until(lambda: len(pair.d.results[long].tokens) >= 20)
        request_id = pair.push(prompt)
        pair.run_until(lambda: is_invited(pair, request_id))
        pair.run_until(lambda: not pair.p.has_work)
        assert pair.p.free_blocks() < pair.p.initial_free_blocks
        assert not pair.d.results[long].finished
        clock.advance(120)
        pair.d.step()
        pair.run_until(lambda: pair.p.free_blocks() == pair.p.initial_free_blocks)
        for ended, its in ((long, local), (request_id, prompt)):
            assert pair.is_right(its, pair.d.run(ended)[0])
        pair.finish()
        assert counts(pair.d)["failed at reserve"] == 1

    @pytest.mark.parametrize("policy", POLICIES)
    def test_the_lease_expires_while_the_push_is_held(
        self, make_pair: MakePair, policy: str
    ) -> None:
        pair = make_pair(
            p={"extra_config": {"max_lease_s": 50.0}}, d={"load_failure_policy": policy}
        )
        faults = pair.push_faults()
        faults.gate, faults.hold_at = threading.Event(), 1
        prompt = prompt_of(70)
        request_id = pair.push(prompt)
        pair.run_until(faults.held.is_set)
        pair.p.drain()
        pair.p_clock.advance(51)
        # The next step that P takes tells its workers.
        pair.p.run(pair.p.add_request(prompt_of(20, 3)))
        assert_failed_by_policy(pair, prompt, pair.run(request_id)[0])
        faults.gate.set()
        assert pair.journal.dones == []
        pair.finish()
        assert counts(pair.p)["leases_expired"] == 1


class TestPromptsDiffer:
    @pytest.mark.parametrize("p_first", [False, True])
    @pytest.mark.parametrize("other", [prompt_of(70, 5), prompt_of(69)])
    def test_d_prefills_its_own(self, make_pair: MakePair, p_first: bool, other: list[int]) -> None:
        pair = make_pair()
        transfer_id = pair.new_transfer(prompt_of(70))
        if p_first:
            pair.p.run(pair.push_p(prompt_of(70), transfer_id))
        request_id = pair.push_d(other, transfer_id)
        if not p_first:
            pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
            pair.p.run(pair.push_p(prompt_of(70), transfer_id))
        assert pair.is_right(other, pair.run(request_id)[0])
        assert pair.network.pushes == []
        pair.p_clock.advance(31)
        pair.finish()
        assert counts(pair.d)["failed at announce"] == 1


class TestOneTransferIdAgain:
    def test_three_times_one_after_the_other(self, make_pair: MakePair) -> None:
        pair = make_pair(d={"enable_prefix_caching": False})
        prompts = [prompt_of(70), prompt_of(70), prompt_of(40, 2)]
        transfer_id = pair.new_transfer(prompts[0])
        for prompt in prompts:
            pair.journal.prompts[transfer_id] = prompt
            pair.push_p(prompt, transfer_id)
            assert pair.is_right(prompt, pair.run(pair.push_d(prompt, transfer_id))[0])
            pair.run_until(lambda: pair.p.free_blocks() == pair.p.initial_free_blocks)
        assert len(pair.journal.dones) == 3
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    @pytest.mark.parametrize("caching", [False, True])
    def test_three_times_at_once_at_d(self, make_pair: MakePair, caching: bool) -> None:
        pair = make_pair(d={"enable_prefix_caching": caching})
        prompt = prompt_of(70)
        transfer_id = pair.new_transfer(prompt)
        ids = [pair.push_d(prompt, transfer_id) for _ in range(3)]
        pair.push_p(prompt, transfer_id)
        for result in pair.run(*ids):
            assert pair.is_right(prompt, result)
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_three_times_at_once_at_p(self, make_pair: MakePair) -> None:
        """Only one of them can be meant; the others are plain prefills."""
        pair = make_pair()
        prompt = prompt_of(70)
        transfer_id = pair.new_transfer(prompt)
        legs = [pair.push_p(prompt, transfer_id) for _ in range(3)]
        assert pair.is_right(prompt, pair.run(pair.push_d(prompt, transfer_id))[0])
        pair.p.run(*legs)
        extra: dict[str, Any] = counts(pair.p)
        assert extra["not_handed_over"] == 2
        pair.p_clock.advance(31)
        pair.finish()


class TestShutdown:
    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("side", ["p", "d"])
    def test_while_a_push_is_under_way(self, make_pair: MakePair, policy: str, side: str) -> None:
        """Its end comes when the worker has nobody left to tell."""
        pair = make_pair(d={"load_failure_policy": policy})
        faults = pair.push_faults()
        faults.gate, faults.hold_at = threading.Event(), 1
        prompt = prompt_of(70)
        request_id = pair.push(prompt)
        pair.run_until(faults.held.is_set)
        (pusher,) = pair.pushers()
        engine = pair.p if side == "p" else pair.d
        engine.workers[0].connector.shutdown()
        if side == "p":
            assert_failed_by_policy(pair, prompt, pair.d.run(request_id)[0])
        faults.gate.set()
        wait_for(lambda: not pusher.num_under_way, "the end of the push")
        assert pair.journal.dones == []
        assert pair.network.open_reservations == []
