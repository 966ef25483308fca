"""A client goes away at any stage of a push, at D or at P: nothing hangs or leaks."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from pairs import MakePair, Pair, counts, prompt_of
from test_push_failures import POLICIES, assert_failed_by_policy
from test_push_layers import FIRST

Stage = Callable[[Pair, list[int]], tuple[str, str]]
"""Brings both legs to a stage; returns P's request, empty if there is none, and D's."""


def announced(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    transfer_id = pair.new_transfer(prompt)
    request_id = pair.push_d(prompt, transfer_id)
    pair.run_until(lambda: transfer_id in pair.handovers._by_transfer)
    return "", request_id


def at_once(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    transfer_id = pair.new_transfer(prompt)
    return pair.push_p(prompt, transfer_id), pair.push_d(prompt, transfer_id)


def queued(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    """P has the request and has not begun it."""
    _, request_id = announced(pair, prompt)
    return pair.push_p(prompt, FIRST), request_id


def first_chunk(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    """P has begun, D has not reserved."""
    at_p, request_id = queued(pair, prompt)
    pair.p.step()
    return at_p, request_id


def reserved(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    at_p, request_id = first_chunk(pair, prompt)
    pair.step_d_until_reserved(FIRST)
    return at_p, request_id


def held(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    """The first chunk's copy is under way."""
    hold(pair)
    at_p, request_id = reserved(pair, prompt)
    pair.d.run_until(lambda: all(pair.push_faults(r).held.is_set() for r in ranks(pair)))
    return at_p, request_id


def last_chunk(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    """P has computed everything and its request is over; copies are under way."""
    at_p, request_id = held(pair, prompt)
    pair.p.run(at_p)
    return at_p, request_id


def done(pair: Pair, prompt: list[int]) -> tuple[str, str]:
    at_p, request_id = reserved(pair, prompt)
    pair.run_until(lambda: len(pair.d.results[request_id].tokens) >= 2)
    return at_p, request_id


STAGES = [announced, at_once, queued, first_chunk, reserved, held, last_chunk, done]
P_STAGES = [at_once, queued, first_chunk, reserved, held]


def ranks(pair: Pair) -> range:
    return range(pair.d.spec.tp_size)


def hold(pair: Pair) -> None:
    for rank in ranks(pair):
        pair.push_faults(rank).gate = threading.Event()


def let_go(pair: Pair) -> None:
    for rank in ranks(pair):
        gate = pair.push_faults(rank).gate
        if gate is not None:
            gate.set()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("tp_size", [1, 2])
class TestAtD:
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("during_step", [False, True])
    def test_s10_hang_none_when_the_client_leaves_at_any_stage(
        self,
        make_pair: MakePair,
        stage: Stage,
        during_step: bool,
        tp_size: int,
        pipeline_depth: int,
    ) -> None:
        pair = make_pair(
            tp_size=tp_size, pipeline_depth=pipeline_depth, p={"max_num_batched_tokens": 32}
        )
        prompt = prompt_of(100)
        at_p, request_id = stage(pair, prompt)
        pair.d.abort(request_id, during_step=during_step)
        pair.d.run_until(lambda: pair.d.free_blocks() == pair.d.initial_free_blocks)
        let_go(pair)
        if at_p:
            pair.p.run(at_p)
        else:
            pair.run_until(lambda: not len(pair.handovers))
            pair.p.run(pair.push_p(prompt, FIRST))
        # A D that P had never heard of may still come; everything else is over at once.
        if stage in (announced, at_once):
            pair.p_clock.advance(31)
        pair.finish()
        if stage not in (announced, at_once):
            assert counts(pair.p).get("leases_expired", 0) == 0
        assert not [name for name in counts(pair.d) if name.startswith("failed")]


class TestReuseAfterAnAbort:
    def test_the_next_owner_of_the_blocks_keeps_its_bytes(self, make_pair: MakePair) -> None:
        """D does not wait for P's copy: it is refused when it comes."""
        pair = make_pair(
            p={"max_num_batched_tokens": 32},
            d={"num_blocks": 8, "max_model_len": 112, "enable_prefix_caching": False},
        )
        at_p, request_id = held(pair, prompt_of(100))
        table = pair.d.block_ids(request_id)[0]
        pair.d.abort(request_id)
        local = prompt_of(105, 2)
        next_owner = pair.decode(local, None, max_tokens=6)
        pair.d.run_until(lambda: len(pair.d.results[next_owner].tokens) >= 2)
        assert set(table) & set(pair.d.block_ids(next_owner)[0])
        let_go(pair)
        assert pair.is_right(local, pair.d.run(next_owner)[0])
        pair.p.run(at_p)
        pair.finish()

    def test_s11_leak_none_when_every_second_of_many_is_aborted(self, make_pair: MakePair) -> None:
        pair = make_pair(num_blocks=200, p={"max_num_batched_tokens": 100})
        prompts = [prompt_of(60, seed) for seed in range(12)]
        ids = [pair.push(prompt) for prompt in prompts]
        pair.run_until(lambda: bool(pair.journal.reserves))
        pair.d.abort(*ids[::2])
        for prompt, result in zip(prompts[1::2], pair.run(*ids[1::2]), strict=True):
            assert pair.is_right(prompt, result)
        pair.run_until(lambda: not pair.p.has_work)
        pair.p_clock.advance(31)
        pair.finish()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tp_size", [1, 2])
class TestAtP:
    @pytest.mark.parametrize("stage", P_STAGES)
    @pytest.mark.parametrize("pipeline_depth", [1, 2])
    @pytest.mark.parametrize("during_step", [False, True])
    def test_at_any_stage(
        self,
        make_pair: MakePair,
        stage: Stage,
        policy: str,
        tp_size: int,
        pipeline_depth: int,
        during_step: bool,
    ) -> None:
        pair = make_pair(
            tp_size=tp_size,
            p={"max_num_batched_tokens": 32, "pipeline_depth": pipeline_depth},
            d={"load_failure_policy": policy, "extra_config": {"first_contact_timeout_s": 0.3}},
        )
        prompt = prompt_of(100)
        at_p, request_id = stage(pair, prompt)
        pair.p.abort(at_p, during_step=during_step)
        pair.p.drain()
        if pair.status(request_id) == "WAITING_FOR_REMOTE_KVS":
            assert_failed_by_policy(pair, prompt, pair.run(request_id)[0])
        else:
            pair.run(request_id)
        let_go(pair)
        assert pair.journal.dones == []
        pair.finish()

    def test_after_its_end_the_lease_stays(
        self, make_pair: MakePair, policy: str, tp_size: int
    ) -> None:
        pair = make_pair(
            tp_size=tp_size,
            p={"max_num_batched_tokens": 32},
            d={"load_failure_policy": policy},
        )
        prompt = prompt_of(100)
        at_p, request_id = last_chunk(pair, prompt)
        pair.p.abort(at_p)
        let_go(pair)
        assert pair.is_right(prompt, pair.run(request_id)[0])
        assert len(pair.journal.dones) == tp_size
        pair.finish()
