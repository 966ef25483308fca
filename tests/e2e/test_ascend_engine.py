"""Engine ``ascend`` in real servers: our engine stands under the vendor's name, with its limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flow import Pair, assert_equal_digests, assert_same_generation, metrics
from prompts import prompt_of

TESTS = Path(__file__).resolve().parents[1]


def test_pull_flow_runs_over_the_vendor_s_names(
    start_pair: Callable[..., Pair], tiny_model: Path
) -> None:
    path = [str(TESTS / "vendor"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    options = {"engine": "ascend"}
    pair = start_pair(
        tiny_model,
        ("--max-model-len", "1024", "--dtype", "float32"),
        prefill=options,
        decode=options,
        environment={"PYTHONPATH": os.pathsep.join(filter(None, path))},
    )
    for seed in (1, 2):
        body = {"prompt": prompt_of(300, seed), "max_tokens": 4, "logprobs": 2}
        params = pair.prefill(**body)["kv_transfer_params"]
        got = pair.decode(params, **body)
        assert_equal_digests(pair.digest_dir, params["llmdd"]["transfer_id"], 3)
        assert_same_generation(pair.reference(**body), got)
    # No server starts with this option unless ``llm_datadist`` can be imported.
    assert metrics(pair.decode_server)["recv_requests"] == 2
