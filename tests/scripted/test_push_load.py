"""More requests than either cache takes, in any order: no circular wait and no deadline."""

from __future__ import annotations

import pytest
from fakes.clock import FakeClock
from pairs import MakePair, Pair, counts, prompt_of

NUM_REQUESTS = 64
LENGTH = 60
"""Tokens; with what is generated, each request takes four blocks on either side."""


def is_idle_of_failures(pair: Pair) -> bool:
    both = [*counts(pair.p).items(), *counts(pair.d).items()]
    bad = ("failed", "leases_expired", "leases_over_cap", "not_handed_over")
    return not [name for name, amount in both if name.startswith(bad) and amount]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [24, 64, 256])
@pytest.mark.parametrize("first", ["p", "d", "both"])
def test_sixty_four_requests_through_caches_of_four(
    make_pair: MakePair, reverse: bool, chunk: int, first: str
) -> None:
    """No clock moves, so nothing can be ended by a deadline."""
    pair = make_pair(
        d_clock=FakeClock(),
        num_blocks=4 * 4 + 1,
        max_model_len=64,
        max_num_seqs=16,
        enable_prefix_caching=False,
        p={"max_num_batched_tokens": chunk},
    )
    prompts = [prompt_of(LENGTH, seed) for seed in range(NUM_REQUESTS)]
    transfers = [pair.new_transfer(prompt) for prompt in prompts]
    order = list(range(NUM_REQUESTS))
    ids: dict[int, str] = {}

    def send_to_p() -> None:
        for index in order:
            pair.push_p(prompts[index], transfers[index])
        if first == "p":
            for _ in range(20):
                pair.p.step()

    def send_to_d() -> None:
        for index in reversed(order) if reverse else order:
            ids[index] = pair.push_d(prompts[index], transfers[index], max_tokens=2)
        if first == "d":
            pair.run_until(lambda: len(pair.handovers) == NUM_REQUESTS)

    for send in (send_to_d, send_to_p) if first == "d" else (send_to_p, send_to_d):
        send()
    pair.run_until(lambda: all(pair.d.results[name].finished for name in ids.values()))
    for index, name in ids.items():
        assert pair.is_right(prompts[index], pair.d.results[name])
    pair.finish()
    assert is_idle_of_failures(pair)
    assert len(pair.journal.dones) == NUM_REQUESTS


def test_one_prompt_that_fills_p_waits_for_no_one(make_pair: MakePair) -> None:
    pair = make_pair(d_clock=FakeClock(), p={"num_blocks": 9, "max_model_len": 128})
    prompts = [prompt_of(120, seed) for seed in range(3)]
    ids = [pair.push(prompt) for prompt in prompts]
    for prompt, result in zip(prompts, pair.run(*ids), strict=True):
        assert pair.is_right(prompt, result)
    pair.finish()
    assert is_idle_of_failures(pair)
