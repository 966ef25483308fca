"""Push and pull of caches other than one group of plain values: sliding windows, and fp8."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import wait_until
from flow import Pair, assert_same_generation, digests, metrics, num_open_leases
from prompts import prompt_of

BLOCK_SIZE = 128
WINDOW = 256
FULL_LAYERS = (2, 5)
FLOWS = ("push", "pull")
LENGTHS = (100, 257, 300, 513, 700, 1500)


@pytest.fixture(scope="module")
def windowed(
    start_pair: Callable[..., Pair], model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    from tiny_model import make_windowed_model

    gemma = make_windowed_model(tmp_path_factory.mktemp("model") / "gemma", model, WINDOW)
    return start_pair(
        gemma,
        arguments=("--dtype", "float32", "--max-model-len", "2048"),
        decode={"kv_load_failure_policy": "fail"},
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )


@pytest.fixture(scope="module")
def fp8(start_pair: Callable[..., Pair], tiny_model: Path) -> Pair:
    return start_pair(
        tiny_model,
        arguments=("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-dtype", "fp8"),
        decode={"kv_load_failure_policy": "fail"},
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )


def send(pair: Pair, flow: str, num_tokens: int) -> dict[int, set[int]]:
    """One prompt; returns the positions of the blocks D got, by layer, all equal to P's."""
    body = {"prompt": prompt_of(num_tokens, seed_of(flow, num_tokens)), "max_tokens": 6}
    body["logprobs"] = 2
    if flow == "push":
        transfer_id = f"push-{num_tokens}"
        got = pair.push(transfer_id, **body)
    else:
        params = pair.prefill(**body)["kv_transfer_params"]
        transfer_id = params["llmdd"]["transfer_id"]
        got = pair.decode(params, **body)
    assert_same_generation(pair.reference(**body), got)
    sent, received = (digests(pair.digest_dir, side) for side in ("send", "recv"))
    places: dict[int, set[int]] = defaultdict(set)
    for key, digest in received.items():
        if key[0] == transfer_id:
            assert sent[key] == digest, f"{key} is not what P sent"
            layer = re.search(r"layers\.(\d+)", key[2])
            assert layer is not None
            places[int(layer[1])].add(key[3])
    return places


def seed_of(flow: str, num_tokens: int) -> int:
    return num_tokens + 10_000 * FLOWS.index(flow)


def assert_nothing_failed(pair: Pair) -> None:
    for server in (pair.prefill_server, pair.decode_server):
        assert not {k: v for k, v in metrics(server).items() if k.startswith("failures") and v}
    wait_until(lambda: num_open_leases(pair) == 0, "P holds nothing any more")


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_windowed_layers_get_their_window(windowed: Pair, flow: str, num_tokens: int) -> None:
    places = send(windowed, flow, num_tokens)
    num_blocks = -(-(num_tokens - 1) // BLOCK_SIZE)
    # What the next token's attention reaches: itself and the WINDOW - 1 tokens before it.
    first_in_window = max(0, num_tokens - WINDOW) // BLOCK_SIZE
    assert sorted(places) == list(range(6))
    for layer, blocks in places.items():
        wanted = set(range(num_blocks))
        if layer not in FULL_LAYERS:
            wanted = set(range(first_in_window, num_blocks))
        assert blocks == wanted, f"layer {layer}"
    assert_nothing_failed(windowed)


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_fp8_values_arrive_as_they_are(fp8: Pair, flow: str, num_tokens: int) -> None:
    places = send(fp8, flow, num_tokens)
    num_blocks = -(-(num_tokens - 1) // BLOCK_SIZE)
    assert places == {layer: set(range(num_blocks)) for layer in range(3)}
    assert_nothing_failed(fp8)
