"""A client goes away: both sides get their blocks back, and no byte arrives after that."""

from __future__ import annotations

import threading

import pytest
from fakes.fake_datadist import Faults, LLMStatusCode
from pairs import PREFILL_LEG, MakePair, Pair, counts, prompt_of


def _start_pull(pair: Pair, seed: int = 1, length: int = 70) -> tuple[str, list[Faults]]:
    """A request of D whose pulls have begun and are held up, on every rank."""
    gates = [pair.network.faults(cluster_id) for cluster_id in pair.producers]
    for faults in gates:
        faults.pull_gate = threading.Event()
        faults.pull_started.clear()
    prompt = prompt_of(length, seed)
    request_id = pair.decode(prompt, pair.params(prompt))
    pair.run_until(lambda: all(faults.pull_started.is_set() for faults in gates))
    return request_id, gates


def _open(gates: list[Faults]) -> None:
    for faults in gates:
        assert faults.pull_gate is not None
        faults.pull_gate.set()


class TestAbortAtD:
    @pytest.mark.parametrize("during_step", [False, True])
    @pytest.mark.parametrize("tp_size", [1, 2])
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    def test_s14_leak_none_when_the_completion_follows_the_abort(
        self, make_pair: MakePair, during_step: bool, tp_size: int, pipeline_depth: int
    ) -> None:
        pair = make_pair(tp_size=tp_size, pipeline_depth=pipeline_depth)
        request_id, gates = _start_pull(pair)
        pair.d.abort(request_id, during_step=during_step)
        for _ in range(5):
            pair.d.step()
        held = pair.d.initial_free_blocks - pair.d.free_blocks()
        assert held == 5, "the blocks stay until nothing is written into them"
        _open(gates)
        pair.finish()
        assert counts(pair.p).get("leases_expired", 0) == 0

    def test_p_is_released_before_the_copy_has_ended(self, make_pair: MakePair) -> None:
        pair = make_pair()
        request_id, gates = _start_pull(pair)
        pair.d.abort(request_id)
        pair.run_until(lambda: pair.p.free_blocks() == pair.p.initial_free_blocks)
        assert gates[0].pull_gate is not None
        assert not gates[0].pull_gate.is_set()
        _open(gates)
        pair.finish()

    @pytest.mark.parametrize("status", [LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_FAILED])
    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_and_the_pull_fails_as_well(
        self, make_pair: MakePair, status: LLMStatusCode, policy: str
    ) -> None:
        pair = make_pair(tp_size=2, d={"load_failure_policy": policy})
        request_id, gates = _start_pull(pair)
        gates[1].pull_status = status
        pair.d.abort(request_id)
        pair.d.step()
        _open(gates)
        pair.finish()

    def test_while_p_s_answer_is_awaited(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        params = pair.params(prompt)
        with pair.p.connector._scheduler._producer.lock:
            request_id = pair.decode(prompt, params)
            for _ in range(5):
                pair.d.step()
            pair.d.abort(request_id)
        pair.finish()
        assert pair.network.pulls == []
        assert counts(pair.p)["leases_released"] == 1

    def test_before_the_first_step(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        pair.d.abort(pair.decode(prompt, pair.params(prompt)))
        pair.finish()
        assert counts(pair.p)["leases_released"] == 1

    def test_while_it_decodes(self, make_pair: MakePair) -> None:
        pair = make_pair(pipeline_depth=2)
        prompt = prompt_of(70)
        request_id = pair.decode(prompt, pair.params(prompt), max_tokens=100)
        pair.run_until(lambda: len(pair.d.results[request_id].tokens) > 3)
        pair.d.abort(request_id)
        pair.finish()

    def test_s11_leak_none_when_many_are_aborted(self, make_pair: MakePair) -> None:
        pair = make_pair(num_blocks=200)
        gates = [pair.network.faults(pair.producers[0])]
        gates[0].pull_gate = threading.Event()
        prompts = [prompt_of(60, seed) for seed in range(12)]
        ids = [pair.decode(prompt, pair.params(prompt)) for prompt in prompts]
        pair.run_until(gates[0].pull_started.is_set)
        pair.d.abort(*ids[::2])
        pair.d.step()
        _open(gates)
        pair.run(*ids[1::2])
        for prompt, request_id in zip(prompts[1::2], ids[1::2], strict=True):
            assert pair.is_right(prompt, pair.d.results[request_id])
        pair.finish()

    def test_a_request_before_others_in_the_queue_delays_them_no_longer(
        self, make_pair: MakePair
    ) -> None:
        """An aborted request's pull that has not begun is left out."""
        pair = make_pair(num_blocks=200)
        first, gates = _start_pull(pair)
        prompts = [prompt_of(60, seed) for seed in (5, 6)]
        ids = [pair.decode(prompt, pair.params(prompt)) for prompt in prompts]
        pair.run_until(lambda: pair.status(ids[1]) == "WAITING_FOR_REMOTE_KVS")
        pair.d.abort(ids[0])
        pair.d.step()
        _open(gates)
        pair.run(first, ids[1])
        assert pair.is_right(prompts[1], pair.d.results[ids[1]])
        assert len(pair.network.pulls) == 2
        pair.finish()


class TestReuseAfterAnAbort:
    def test_the_next_owner_of_the_blocks_keeps_its_bytes(self, make_pair: MakePair) -> None:
        """The pool is small, so the next prompt gets the aborted one's blocks."""
        pair = make_pair(p={"num_blocks": 64}, d={"num_blocks": 11, "max_model_len": 128})
        aborted, gates = _start_pull(pair, length=100)
        pair.d.abort(aborted)
        local = prompt_of(110, 2)
        next_owner = pair.decode(local, None, max_tokens=6)
        for _ in range(5):
            pair.d.step()
        assert pair.status(next_owner) == "WAITING"
        _open(gates)
        assert pair.is_right(local, pair.run(next_owner)[0])
        pair.finish()


class TestAbortAtP:
    def test_an_aborted_prefill_is_not_handed_over(self, make_pair: MakePair) -> None:
        pair = make_pair(p={"max_num_batched_tokens": 32})
        request_id = pair.start_prefill(prompt_of(200))
        pair.p.step()
        pair.p.abort(request_id)
        pair.finish()
        assert pair.p.results[request_id].kv_transfer_params is None
        assert "leases_opened" not in counts(pair.p)

    def test_an_abort_after_the_end_does_not_touch_the_lease(self, make_pair: MakePair) -> None:
        pair = make_pair()
        prompt = prompt_of(70)
        request_id = pair.start_prefill(prompt)
        params = pair.p.run(request_id)[0].kv_transfer_params
        pair.p.abort(request_id)
        pair.p.step()
        assert pair.is_right(prompt, pair.run(pair.decode(prompt, params))[0])
        assert pair.network.pulls
        pair.finish()

    def test_a_prefill_without_our_leg_is_freed_at_once(self, make_pair: MakePair) -> None:
        pair = make_pair()
        plain = dict.fromkeys(PREFILL_LEG)
        pair.p.run(pair.p.add_request(prompt_of(70), kv_transfer_params=plain))
        assert pair.p.free_blocks() == pair.p.initial_free_blocks
        pair.finish()
