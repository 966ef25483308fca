"""Small random scenarios: order of arrival, chunk sizes, preemptions, aborts and faults.

Whatever happens, a request that is not aborted ends right or, where a push was made to fail, as the
policy says; no byte reported as done is wrong, and nothing is left behind.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes.fake_datadist import LLMStatusCode
from harness import VERSION
from pairs import MakePair, Pair, counts, prompt_of

NUM_REQUESTS = 8


class Scenario:
    """One pair and what happens to it, drawn from a seed."""

    def __init__(self, make_pair: MakePair, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = self.random.choice(["recompute", "fail"])
        several_groups = self.policy == "fail" and VERSION >= (0, 30)
        self.pair = make_pair(
            tp_size=self.random.choice([1, 1, 2]),
            pipeline_depth=self.random.choice([1, 2]),
            sliding_window=self.random.choice([None, 40]) if several_groups else None,
            zero_new_blocks=self.random.choice([False, True]),
            enable_prefix_caching=self.random.choice([False, True]),
            max_model_len=256,
            p={
                "num_blocks": self.random.choice([36, 64, 200]),
                "max_num_batched_tokens": self.random.choice([16, 40, 64, 300]),
            },
            d={
                "num_blocks": self.random.choice([36, 64, 200]),
                "load_failure_policy": self.policy,
                "extra_config": {"push": self.random.random() < 0.9},
            },
        )
        self.is_pushed = bool(self.pair.d.spec.extra_config["push"])
        self.prompts: dict[str, list[int]] = {}
        self.at_p: list[str] = []
        self.aborted: set[str] = set()
        self.is_disturbed = False
        """Something was made to fail, so that a request may end in an error."""

    def legs(self) -> list[Any]:
        """Both legs of all requests, in a random order."""
        legs: list[Any] = []
        for index in range(NUM_REQUESTS):
            same = self.random.random() < 0.2
            prompt = prompt_of(self.random.randint(2, 180), 0 if same else index)
            transfer_id = self.pair.new_transfer(prompt)
            legs += [(self.send_p, prompt, transfer_id), (self.send_d, prompt, transfer_id)]
        self.random.shuffle(legs)
        return legs

    def send_p(self, prompt: list[int], transfer_id: str) -> None:
        max_tokens = self.random.choice([1, 1, 12])
        self.at_p.append(self.pair.push_p(prompt, transfer_id, max_tokens=max_tokens))

    def send_d(self, prompt: list[int], transfer_id: str) -> None:
        request_id = self.pair.push_d(prompt, transfer_id, self.random.randint(1, 8))
        self.prompts[request_id] = prompt

    def some_steps(self) -> None:
        for _ in range(self.random.randint(0, 4)):
            self.random.choice([self.pair.p, self.pair.d]).step()

    def disturb(self) -> None:
        """At most one thing goes wrong."""
        what = self.random.random()
        if what < 0.15:
            self.preempt()
        elif what < 0.25:
            self.abort_at_d()
        elif what < 0.30:
            self.abort_at_p()
        elif what < 0.35:
            self.is_disturbed = True
            faults = self.pair.push_faults(self.random.randrange(self.pair.d.spec.tp_size))
            faults.num_failures, faults.at_layer = 1, self.random.randrange(2)
            faults.status = self.random.choice(
                [LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_FAILED]
            )

    def preempt(self) -> None:
        running = [request.request_id for request in self.pair.p.scheduler.running]
        if running:
            self.pair.p.preempt(self.random.choice(running))

    def abort_at_d(self) -> None:
        if self.prompts:
            request_id = self.random.choice(list(self.prompts))
            self.aborted.add(request_id)
            self.pair.d.abort(request_id, during_step=self.random.random() < 0.5)

    def abort_at_p(self) -> None:
        if self.at_p:
            self.is_disturbed = True
            self.pair.p.abort(self.random.choice(self.at_p))

    def run(self) -> None:
        for send, prompt, transfer_id in self.legs():
            send(prompt, transfer_id)
            self.some_steps()
            self.disturb()
        wanted = self.prompts.keys() - self.aborted
        self.pair.run_until(
            lambda: all(self.pair.d.results[request_id].finished for request_id in wanted)
        )
        for request_id in wanted:
            self.check(request_id)

    def check(self, request_id: str) -> None:
        result = self.pair.d.results[request_id]
        if not self.pair.is_right(self.prompts[request_id], result):
            assert self.is_disturbed
            assert self.policy == "fail"
            assert (result.finish_reason, result.tokens) == ("error", [])


def _num_failures(pair: Pair) -> int:
    return sum(n for name, n in counts(pair.d).items() if name.startswith("failed"))


@pytest.mark.parametrize("seed", range(32))
def test_every_invariant_holds(make_pair: MakePair, seed: int) -> None:
    scenario = Scenario(make_pair, seed)
    scenario.run()
    pair = scenario.pair
    if not scenario.is_disturbed and scenario.is_pushed:
        # What is pulled may be more than leases may hold.
        assert _num_failures(pair) == 0
    if not scenario.is_disturbed and not scenario.aborted:
        pair.run_until(lambda: not pair.p.has_work)
        assert counts(pair.p).get("leases_expired", 0) == 0
    # P waits, and holds blocks, for a D that went away before P had heard of it.
    pair.p_clock.advance(31)
    pair.run_until(lambda: not pair.p.has_work)
    pair.p_clock.advance(31)
    pair.finish()
