"""Engine ``ascend`` in real servers: our engine stands under the vendor's name, with its limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flow import Pair, assert_equal_digests, assert_same_generation, metrics
from prompts import prompt_of

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pair(start_pair: Callable[..., Pair], tiny_model: Path) -> Pair:
    """No server starts with this engine unless ``llm_datadist`` can be imported."""
    path = [str(TESTS / "vendor"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    options = {"engine": "ascend"}
    return start_pair(
        tiny_model,
        ("--max-model-len", "1024", "--dtype", "float32"),
        prefill=options,
        decode=options,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, path))},
        prefill_arguments=("--max-num-batched-tokens", "256"),
    )


def test_finished_prompts_are_pulled(pair: Pair) -> None:
    for seed in (1, 2):
        body = {"prompt": prompt_of(300, seed), "max_tokens": 4, "logprobs": 2}
        params = pair.prefill(**body)["kv_transfer_params"]
        got = pair.decode(params, **body)
        assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 3)
        assert_same_generation(pair.reference(**body), got)
    assert metrics(pair.decode_server)["recv_requests"] == 2


def test_prompts_are_pushed_in_chunks_and_several_at_once(pair: Pair) -> None:
    assert pair.control_port
    bodies = [
        {"prompt": prompt_of(600, 10 + number), "max_tokens": 4, "logprobs": 2}
        for number in range(3)
    ]
    before = pair.prefill_metrics()["sent_requests"]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda n: pair.push(f"pushed-{n}", **bodies[n]), range(3)))
    for number, body in enumerate(bodies):
        assert_equal_digests(pair.digest_dir, f"pushed-{number}", 5)
        assert_same_generation(pair.reference(**body), answers[number])
    assert pair.prefill_metrics()["sent_requests"] == before + 3, "P pushed them"
    for server in (pair.prefill_server, pair.decode_server):
        failures = {k: v for k, v in metrics(server).items() if k.startswith("failures") and v}
        assert not failures
