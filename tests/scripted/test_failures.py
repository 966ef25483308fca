"""What can fail between the grant and the report; D's request always ends as the policy says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
from fakes.clock import wait_for
from fakes.fake_datadist import LLMStatusCode
from harness import Result
from pairs import CONNECTOR, MakePair, Pair, counts, num_blocks_pulled, prompt_of

from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.scheduler.producer_control import ProducerControl

POLICIES = ["recompute", "fail"]
FAST: dict[str, Any] = {"extra_config": {"release_timeout_s": 0.2, "first_contact_timeout_s": 0.3}}


def assert_failed_by_policy(pair: Pair, prompt: list[int], result: Result) -> None:
    """Recompute gives the right tokens, fail gives an error and not one token."""
    if pair.d.spec.load_failure_policy == "recompute":
        assert pair.is_right(prompt, result)
    else:
        assert (result.finish_reason, result.tokens) == ("error", [])


@pytest.mark.parametrize("policy", POLICIES)
class TestPullFails:
    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_one_rank_s_pull_fails(
        self, make_pair: MakePair, policy: str, rank: int, pipeline_depth: int
    ) -> None:
        pair = make_pair(
            tp_size=2, pipeline_depth=pipeline_depth, d={"load_failure_policy": policy}
        )
        faults = pair.network.faults(pair.producers[rank])
        faults.pull_status = LLMStatusCode.LLM_TIMEOUT
        prompt = prompt_of(70)
        assert_failed_by_policy(pair, prompt, pair.transfer(prompt))
        pair.finish()
        assert counts(pair.d)["failed at transfer"] == 1
        faults.pull_status = None
        later = prompt_of(70, 2)
        assert pair.is_right(later, pair.transfer(later))
        pair.finish()

    def test_half_the_blocks_have_arrived(self, make_pair: MakePair, policy: str) -> None:
        """P dies in the middle of the copy."""
        pair = make_pair(d={"load_failure_policy": policy})
        cluster_id = pair.producers[0]
        kill = _once(lambda: pair.network.kill(cluster_id))
        pair.network.faults(cluster_id).after_block = lambda count: kill() if count == 3 else None
        prompt = prompt_of(70)
        assert_failed_by_policy(pair, prompt, pair.transfer(prompt))
        pair.finish()

    def test_a_local_prefix_survives_the_failure(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        prompt = prompt_of(100)
        pair.d.run(pair.d.add_request(prompt[:64]))
        pair.network.faults(pair.producers[0]).pull_status = LLMStatusCode.LLM_FAILED
        assert_failed_by_policy(pair, prompt, pair.transfer(prompt))
        pair.finish()
        again = pair.d.run(pair.d.add_request(prompt[:65], max_tokens=2))[0]
        assert pair.is_right(prompt[:65], again)

    def test_others_are_not_touched(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(num_blocks=128, d={"load_failure_policy": policy})
        faults = pair.network.faults(pair.producers[0])
        faults.pull_status, faults.num_pull_failures = LLMStatusCode.LLM_FAILED, 1
        prompts = [prompt_of(60, seed) for seed in range(4)]
        ids = [pair.decode(prompt, pair.params(prompt)) for prompt in prompts]
        results = pair.run(*ids)
        right = [pair.is_right(p, r) for p, r in zip(prompts, results, strict=True)]
        assert right.count(False) == (policy == "fail")
        pair.finish()

    def test_p_is_silent_after_the_copy(
        self, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, policy: str
    ) -> None:
        """The copy is complete, but nobody confirms that the blocks were held."""
        pair = make_pair(d={"load_failure_policy": policy, **FAST})
        prompt = prompt_of(70)
        params = pair.params(prompt)
        deaf = Mock(side_effect=RemoteProtocolError("not heard"))
        monkeypatch.setattr(ProducerControl, "_released", deaf)
        result = pair.run(pair.decode(prompt, params))[0]
        assert_failed_by_policy(pair, prompt, result)
        pair.finish()
        assert counts(pair.d)["failed at release"] == 1


@pytest.mark.parametrize("policy", POLICIES)
class TestLinkFails:
    def test_a_link_that_fails_once_is_tried_again(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        pair.network.faults(pair.producers[0]).num_link_failures = 1
        prompt = prompt_of(70)
        assert pair.is_right(prompt, pair.transfer(prompt))
        pair.finish()

    def test_a_link_that_fails_twice_fails_the_request(
        self, make_pair: MakePair, policy: str
    ) -> None:
        pair = make_pair(d={"load_failure_policy": policy})
        pair.network.faults(pair.producers[0]).num_link_failures = 2
        prompt = prompt_of(70)
        assert_failed_by_policy(pair, prompt, pair.transfer(prompt))
        assert pair.network.pulls == []
        pair.finish()


class TestPIsGone:
    """Before D has blocks for the request, every failure means a local prefill."""

    def test_before_the_first_contact(self, make_pair: MakePair) -> None:
        pair = make_pair(d=FAST)
        prompt = prompt_of(70)
        params = pair.params(prompt)
        pair.p.close()
        result = pair.d.run(pair.decode(prompt, params))[0]
        assert pair.is_right(prompt, result)
        assert counts(pair.d)["failed at connection"] == 1
        assert pair.network.pulls == []

    def test_it_does_not_answer_in_time(self, make_pair: MakePair) -> None:
        pair = make_pair(d=FAST)
        self._answer_late(pair)
        pair.p_clock.advance(60)
        pair.finish()

    def test_p_is_told_that_its_late_answer_is_not_needed(self, make_pair: MakePair) -> None:
        pair = make_pair(d=FAST)
        self._answer_late(pair)
        pair.run_until(lambda: pair.p.free_blocks() == pair.p.initial_free_blocks)

    def _answer_late(self, pair: Pair) -> None:
        """D's control thread sees the deadline pass before vLLM asks again."""
        prompt = prompt_of(70)
        params = pair.params(prompt)
        with pair.p.connector._scheduler._producer.lock:
            request_id = pair.decode(prompt, params)
            wait_for(lambda: pair.d.connector._scheduler._client._outcomes, "the refusal")
            result = pair.d.run(request_id)[0]
        assert pair.is_right(prompt, result)
        assert pair.network.pulls == []

    @pytest.mark.parametrize("policy", POLICIES)
    def test_during_the_pull(self, make_pair: MakePair, policy: str) -> None:
        pair = make_pair(d={"load_failure_policy": policy, **FAST})
        faults = pair.network.faults(pair.producers[0])
        faults.pull_gate = threading.Event()
        prompt = prompt_of(70)
        request_id = pair.decode(prompt, pair.params(prompt))
        pair.run_until(faults.pull_started.is_set)
        pair.p.close()
        faults.pull_gate.set()
        result = pair.d.run(request_id)[0]
        assert_failed_by_policy(pair, prompt, result)
        pair.d.drain()
        assert pair.d.free_blocks() == pair.d.initial_free_blocks

    @pytest.mark.parametrize("engine_id", [None, "the-same"])
    def test_another_process_has_its_address(
        self, make_pair: MakePair, make_engine: Any, engine_id: str | None
    ) -> None:
        """P is restarted: what the old one promised is void, the new one serves at once."""
        pair = make_pair(p={"engine_id": engine_id})
        old_prompt = prompt_of(70)
        pair.transfer(prompt_of(50, 3))
        params = pair.params(old_prompt)
        port = params["remote_port"]
        pair.p.close()
        restarted = make_engine(
            **CONNECTOR,
            role="kv_producer",
            engine_id=engine_id,
            extra_config={"control_port": port},
        )
        result = pair.d.run(pair.decode(old_prompt, params))[0]
        assert pair.is_right(old_prompt, result)
        pulled = num_blocks_pulled(pair)
        again = Pair(restarted, pair.d, pair.network, pair.p_clock, pair.journal)
        prompt = prompt_of(70, 2)
        assert again.is_right(prompt, again.transfer(prompt))
        assert num_blocks_pulled(again) == pulled + 5
        again.finish()


class TestPeersThatDoNotFit:
    @pytest.mark.parametrize(
        "fields", [{"num_layers": 2}, {"head_dim": 32}, {"block_size": 32}, {"tp_size": 2}]
    )
    def test_a_mismatch_ends_in_a_local_prefill(
        self, make_pair: MakePair, fields: dict[str, Any]
    ) -> None:
        pair = make_pair(p=fields, d={"load_failure_policy": "fail"})
        prompt = prompt_of(70)
        result = pair.run(pair.decode(prompt, pair.params(prompt)))[0]
        assert pair.is_right(prompt, result)
        assert counts(pair.d)["failed at handshake"] == 1
        assert pair.network.pulls == []


def _once(action: Callable[[], None]) -> Callable[[], None]:
    done = threading.Event()

    def run() -> None:
        if not done.is_set():
            done.set()
            action()

    return run


def test_a_stopped_p_delays_no_other_request(make_pair: MakePair) -> None:
    """P stands still in the middle of a copy; what D has to do without P goes on."""
    pair = make_pair()
    faults = pair.network.faults(pair.producers[0])
    faults.pull_gate = threading.Event()
    prompt, local = prompt_of(70), prompt_of(70, 2)
    waiting = pair.decode(prompt, pair.params(prompt))
    pair.run_until(faults.pull_started.is_set)
    assert pair.is_right(local, pair.run(pair.decode(local, None))[0])
    assert pair.status(waiting) == "WAITING_FOR_REMOTE_KVS"
    faults.pull_gate.set()
    wait_for(lambda: pair.d.step() or pair.d.results[waiting].finished, "the late pull")
    pair.run(waiting)
    assert pair.is_right(prompt, pair.d.results[waiting])
    pair.finish()
