"""Sliding windows: what D computes from, at every prompt length around the blocks' ends."""

from __future__ import annotations

import importlib.util

import pytest
from pairs import MakePair, counts, num_blocks_pulled, prompt_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm.v1.metrics.cache_hit_source") is None,
    reason="this vLLM cannot be told of a failed load into a windowed group, so D refuses to start",
)


@pytest.mark.parametrize("window", [16, 32, 33, 40])
@pytest.mark.parametrize("num_generated_at_p", [1, 2, 20])
def test_every_length_gives_the_right_tokens(
    make_pair: MakePair, window: int, num_generated_at_p: int
) -> None:
    """Once, of every ``block_size`` lengths one read the null block: vLLM moved the window past the
    block that the recomputed last token still needed."""
    pair = make_pair(
        sliding_window=window,
        num_blocks=200,
        d={"enable_prefix_caching": False, "load_failure_policy": "fail"},
    )
    lengths = range(2, 100)
    for length in lengths:
        prompt = prompt_of(length, length)
        params = pair.params(prompt, max_tokens=num_generated_at_p)
        result = pair.run(pair.decode(prompt, params, max_tokens=3))[0]
        assert pair.is_right(prompt, result), f"length {length}, window {window}"
    if num_generated_at_p == 1:
        assert num_blocks_pulled(pair) > len(lengths)
        assert 0 < counts(pair.d)["failed at block map"] <= len(lengths) // 16 + 1
    pair.finish()
