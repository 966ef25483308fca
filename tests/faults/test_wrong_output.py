"""Silent wrong output: what could put other bytes under a request than those of its prompt."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock
from harness import VERSION
from pairs import MakePair, Pair, counts, prompt_of

SMALL = {"num_blocks": 6, "max_model_len": 64, "enable_prefix_caching": False}
HYBRID = pytest.mark.skipif(
    VERSION < (0, 30), reason="such a model is refused, because vLLM cannot be told of failures"
)


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.skipif(VERSION < (0, 24), reason="on a device the copy waits for the step by an event")
def test_s18_wrong_output_by_a_step_in_flight(make_pair: MakePair, is_push: bool) -> None:
    """An aborted request's step has still to write when its blocks are allocated for a transfer."""
    pair = make_pair(d={**SMALL, "pipeline_depth": 2, "device_lag": True})
    prompt = prompt_of(60)
    params = None if is_push else pair.params(prompt)
    victim = pair.d.add_request(prompt_of(20, 2), max_tokens=30)
    pair.d.run_until(lambda: len(pair.d.results[victim].tokens) == 2)
    pair.d.abort(victim)
    request_id = pair.push(prompt) if is_push else pair.decode(prompt, params)
    result = pair.run(request_id)[0]
    assert pair.is_right(prompt, result)
    assert counts(pair.d)["recv_requests"] == 1
    pair.finish()


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_s19_wrong_output_by_zeroing(make_pair: MakePair, pipeline_depth: int) -> None:
    """vLLM zeroes new blocks in the step that orders their transfer; they are scarce, so that they
    change owners again and again."""
    pair = make_pair(
        num_blocks=200,
        pipeline_depth=pipeline_depth,
        zero_new_blocks=True,
        d={"num_blocks": 14, "max_model_len": 128, "enable_prefix_caching": False},
    )
    prompts = {}
    for seed in range(8):
        prompt = prompt_of(50 + seed, seed)
        is_push = seed % 2
        prompts[pair.push(prompt) if is_push else pair.decode(prompt, pair.params(prompt))] = prompt
    for request_id, prompt in prompts.items():
        assert pair.is_right(prompt, pair.run(request_id)[0])
    pair.finish()
    assert counts(pair.d)["recv_requests"] == len(prompts)


@HYBRID
@pytest.mark.parametrize("is_push", [False, True])
def test_s20_wrong_output_in_hybrid_groups_with_steps_in_flight(
    make_pair: MakePair, is_push: bool
) -> None:
    pair = make_pair(
        sliding_window=24,
        num_blocks=200,
        pipeline_depth=2,
        max_num_batched_tokens=32,
        d={"enable_prefix_caching": False, "load_failure_policy": "fail"},
    )
    for length in (33, 70, 97, 129):
        prompt = prompt_of(length, length)
        result = pair.run(pair.push(prompt))[0] if is_push else pair.transfer(prompt)
        assert pair.is_right(prompt, result)
    pair.finish()
    assert counts(pair.d)["recv_requests"] == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_s23_wrong_output_in_the_second_turn(make_pair: MakePair, is_late: bool) -> None:
    """The server that decoded the first turn hands it over for the second one; its lease may be
    over, and its blocks used for something else, when the other server reads them."""
    clock = FakeClock()
    pair = make_pair(
        d_clock=clock,
        p={"role": "kv_both", "load_failure_policy": "fail", "enable_prefix_caching": False},
        d={"role": "kv_both", "load_failure_policy": "fail", "num_blocks": 12},
        max_model_len=150,
    )
    first = prompt_of(60)
    result = pair.transfer(first)
    back = Pair(pair.d, pair.p, pair.network, clock, pair.journal)
    second = [*first, *result.tokens, *prompt_of(20, 5)]
    params = back.params(second)
    if is_late:
        clock.advance(31)
        back.p.run(back.p.add_request(prompt_of(140, 7)))
    num_received = counts(back.d).get("recv_requests", 0)
    assert back.is_right(second, back.run(back.decode(second, params))[0])
    assert counts(back.d).get("recv_requests", 0) - num_received == (0 if is_late else 1)
    pair.finish()
