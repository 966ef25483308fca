"""The push flow between two real servers on SmolLM2: bytes by digest, results by logprobs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import wait_until
from flow import (
    Pair,
    assert_equal_digests,
    assert_same_generation,
    metrics,
    num_open_leases,
)
from prompts import prompt_of

BLOCK_SIZE = 128


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], model: Path) -> Pair:
    return start_pair(
        model,
        arguments=("--dtype", "float32", "--max-model-len", "4096"),
        # On a busy machine 32 prompts wait long for their turn.
        prefill={"lease_s": 60},
        decode={
            "first_contact_timeout_s": 60,
            "reserve_timeout_s": 300,
            "request_timeout_s": 300,
        },
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )


def check_push(pair: Pair, num_tokens: int, seed: int, num_blocks: int, **delays: float) -> None:
    """One prompt by push; compare digests and generation with a single server."""
    body = {"prompt": prompt_of(num_tokens, seed), "max_tokens": 6, "logprobs": 2}
    transfer_id = f"transfer-{num_tokens}-{seed}"
    assert pair.control_port
    before = pair.prefill_metrics()
    got = pair.push(transfer_id, **delays, **body)
    assert_same_generation(pair.reference(**body), got)
    assert_equal_digests(pair.digest_dir, transfer_id, num_blocks)
    after = pair.prefill_metrics()
    assert after["sent_requests"] == before["sent_requests"] + 1, "P pushed it"
    wait_until(lambda: num_open_leases(pair) == 0, "P holds nothing any more")
    assert pair.prefill_metrics()["leases_expired"] == 0


@pytest.mark.parametrize("num_tokens", [5, 127, 129, 255, 257, 383, 2100])
def test_prompt_of_any_length_arrives_whole(pair: Pair, num_tokens: int) -> None:
    check_push(pair, num_tokens, num_tokens, -(-(num_tokens - 1) // BLOCK_SIZE))


def test_32_at_once(pair: Pair) -> None:
    bodies = [
        {"prompt": prompt_of(300, 1000 + number), "max_tokens": 4, "logprobs": 2}
        for number in range(32)
    ]
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda n: pair.push(f"many-{n}", **bodies[n]), range(32)))
    for number, body in enumerate(bodies):
        assert_equal_digests(pair.digest_dir, f"many-{number}", 3)
        assert_same_generation(pair.reference(**body), answers[number])
    wait_until(lambda: num_open_leases(pair) == 0, "P holds nothing any more")


def test_nothing_failed(pair: Pair) -> None:
    for server in (pair.prefill_server, pair.decode_server):
        failures = {k: v for k, v in metrics(server).items() if k.startswith("failures") and v}
        assert not failures
