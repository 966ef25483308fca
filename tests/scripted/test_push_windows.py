"""Sliding windows: P drops blocks while it computes, and D does not want all of them."""

from __future__ import annotations

import importlib.util

import pytest
from pairs import MakePair, counts, prompt_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is None,
    reason="this vLLM cannot be told of a failed load into a windowed group, so D refuses to start",
)


@pytest.mark.parametrize("window", [16, 33, 40])
@pytest.mark.parametrize("chunk", [32, 512])
@pytest.mark.parametrize("num_generated_at_p", [1, 20])
def test_every_length_gives_the_right_tokens(
    make_pair: MakePair, window: int, chunk: int, num_generated_at_p: int
) -> None:
    pair = make_pair(
        sliding_window=window,
        num_blocks=200,
        p={"max_num_batched_tokens": chunk},
        d={"enable_prefix_caching": False, "load_failure_policy": "fail"},
    )
    for length in range(2, 100):
        prompt = prompt_of(length, length)
        transfer_id = pair.new_transfer(prompt)
        pair.push_p(prompt, transfer_id, max_tokens=num_generated_at_p)
        request_id = pair.push_d(prompt, transfer_id, max_tokens=3)
        assert pair.is_right(prompt, pair.run(request_id)[0]), f"length {length}"
    pair.finish()
    assert not [name for name in counts(pair.d) if name.startswith("failed")]
    assert len(pair.journal.dones) == 98


@pytest.mark.parametrize("length", [96, 97, 100, 150])
@pytest.mark.parametrize("window", [16, 24, 48])
def test_p_has_moved_past_blocks_when_d_reserves(
    make_pair: MakePair, length: int, window: int
) -> None:
    """After its last chunk P holds what the last token reads, and D wants no more than that."""
    pair = make_pair(sliding_window=window, p={"max_num_batched_tokens": 32})
    prompt = prompt_of(length)
    transfer_id = pair.new_transfer(prompt)
    at_p = pair.push_p(prompt, transfer_id, max_tokens=40)
    pair.p.run(at_p)
    request_id = pair.push_d(prompt, transfer_id, max_tokens=20)
    assert pair.is_right(prompt, pair.run(request_id)[0])
    assert len(pair.journal.dones) == 1
    pair.finish()
