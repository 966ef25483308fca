"""Servers that do not fit each other: one sentence with both values, and nothing stays held."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import MakePair, counts, prompt_of

PROMPT = prompt_of(70)


@pytest.mark.parametrize("is_push", [False, True])
@pytest.mark.parametrize(
    ("p", "d", "sentence"),
    [
        ({"tp_size": 1}, {"tp_size": 2}, "tensor_parallel_size differs: local 1, peer 2"),
        ({"tp_size": 2}, {"tp_size": 1}, "tensor_parallel_size differs: local 2, peer 1"),
        ({}, {"block_size": 32}, "block_size of KV cache group 0 differs: local 16, peer 32"),
        ({}, {"model_name": "other"}, "model differs: local 'scripted', peer 'other'"),
    ],
)
def test_s37_refused_at_the_handshake(
    make_pair: MakePair,
    log: list[str],
    p: dict[str, Any],
    d: dict[str, Any],
    sentence: str,
    is_push: bool,
) -> None:
    """Both servers say it, D prefills under either policy, and P's blocks are its own again."""
    pair = make_pair(p=p, d={**d, "load_failure_policy": "fail"})
    for prompt in (PROMPT, prompt_of(70, 2)):
        result = pair.run(pair.push(prompt))[0] if is_push else pair.transfer(prompt)
        assert pair.is_right(prompt, result)
    refusals = [line for line in log if sentence in line]
    assert len([text for text in refusals if "a decode server was refused" in text]) == 1
    assert len([text for text in refusals if "prefilled locally" in text]) == 2
    assert counts(pair.d)["failed at handshake"] == 2
    assert pair.network.links == []
    pair.run_until(lambda: not (pair.p.has_work or pair.d.has_work))
    pair.p_clock.advance(31)
    pair.finish()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_s37_hang_none_since_each_rank_says_done(make_pair: MakePair, tp_size: int) -> None:
    pair = make_pair(tp_size=tp_size)
    assert pair.is_right(PROMPT, pair.run(pair.push(PROMPT))[0])
    pair.finish()
    assert len(pair.journal.dones) == len({done.reservation for done in pair.journal.dones})
    assert len(pair.journal.dones) == tp_size
