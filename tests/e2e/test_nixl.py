"""Both flows between two real servers whose bytes move through NIXL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_until
from contract.nixl_pair import needs_nixl
from flow import Pair, assert_equal_digests, assert_same_generation, metrics, num_open_leases
from prompts import prompt_of

pytestmark = [pytest.mark.slow, needs_nixl]

NUM_TOKENS, NUM_BLOCKS = 700, 6


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], model: Path) -> Pair:
    return start_pair(
        model,
        arguments=("--dtype", "float32", "--max-model-len", "2048"),
        prefill={"transport": "nixl"},
        decode={"transport": "nixl", "kv_load_failure_policy": "fail"},
        prefill_arguments=("--max-num-batched-tokens", "256"),
        environment={"UCX_TLS": "tcp"},
    )


@pytest.mark.parametrize(("flow", "seed"), [("push", 1), ("pull", 2)])
def test_same_generation_and_bytes(pair: Pair, flow: str, seed: int) -> None:
    # Prompts that differ, or D would find the first one's blocks in its own cache.
    body = {"prompt": prompt_of(NUM_TOKENS, seed), "max_tokens": 6, "logprobs": 2}
    if flow == "push":
        transfer_id = "over-nixl"
        got = pair.push(transfer_id, **body)
    else:
        params = pair.prefill(**body)["kv_transfer_params"]
        transfer_id = params["llmdd"]["transfer_id"]
        got = pair.decode(params, **body)
    assert_same_generation(pair.reference(**body), got)
    assert_equal_digests(pair.digest_dir, transfer_id, NUM_BLOCKS)
    for server in (pair.prefill_server, pair.decode_server):
        assert not {k: v for k, v in metrics(server).items() if k.startswith("failures") and v}
    wait_until(lambda: num_open_leases(pair) == 0, "P holds nothing any more")
