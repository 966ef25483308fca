"""A real push and a real pull between two processes, and the picture that their traces make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import Request, merge
from vllm_llmdd_connector.trace.summary import summarize

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_layer_overlap.py"
LAYERS, TOKENS, TOKEN_BYTES, STEPS = 5, 512, 32, 2
PATIENCE_S = 240
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Request]:
    """The last request of each flow."""
    folder = tmp_path_factory.mktemp("traces")
    options = {
        "--tokens": TOKENS,
        "--chunk-tokens": TOKENS // STEPS,
        "--token-bytes": TOKEN_BYTES,
        "--layers": LAYERS,
        "--compute-ms": 1,
        "--repeats": 1,
        "--rates": 1,
        "--trace-dir": folder,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, str(BENCH), *words]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    files = read_all([folder])
    assert {file.facts["role"] for file in files} == {"kv_producer", "kv_consumer"}
    assert all(file.has_end and not file.num_dropped for file in files)
    return {request.flow: request for request in merge(files)}


class TestPush:
    def test_each_layer_of_each_step_is_computed_then_sent_then_acknowledged(
        self, requests: dict[str, Request]
    ) -> None:
        request = requests["push"]
        assert [step.is_last for step in request.steps] == [False, True]
        by_layer: dict[int, list[tuple[int, int]]] = {}
        for copy in request.copies:
            ((cache, layer),) = copy.layers
            assert cache == 0
            by_layer.setdefault(layer, []).append((copy.begin_ns, copy.end_ns))
        assert sorted(by_layer) == list(range(LAYERS))
        for layer, sent in by_layer.items():
            computed = [step.computed[0, layer] for step in request.steps]
            for computed_ns, (started_ns, acknowledged_ns) in zip(
                sorted(computed), sorted(sent), strict=True
            ):
                assert computed_ns <= started_ns < acknowledged_ns

    def test_d_has_it_after_the_last_acknowledgement(self, requests: dict[str, Request]) -> None:
        request = requests["push"]
        assert request.moments["reserve"] <= min(copy.begin_ns for copy in request.copies)
        assert request.moments["arrival"] >= max(copy.end_ns for copy in request.copies)

    def test_summary_is_consistent(self, requests: dict[str, Request]) -> None:
        summary = summarize(requests["push"])
        assert summary.num_tokens == TOKENS
        assert summary.layer_bytes == [TOKENS * TOKEN_BYTES] * LAYERS
        assert summary.num_bytes == LAYERS * TOKENS * TOKEN_BYTES
        assert summary.exposed_ms is not None
        assert summary.exposed_ms > 0
        assert summary.overlap_share is not None
        # The last layer of the last step cannot have been there before it was computed.
        assert 0 <= summary.overlap_share <= 1 - 1 / (LAYERS * STEPS)


class TestPull:
    def test_nothing_moves_before_p_has_finished(self, requests: dict[str, Request]) -> None:
        request = requests["pull"]
        (copy,) = request.copies
        assert request.last_computed_ns is not None
        assert request.last_computed_ns <= copy.begin_ns < copy.end_ns
        assert copy.end_ns <= request.moments["arrival"]
        summary = summarize(request)
        assert summary.layer_bytes == [TOKENS * TOKEN_BYTES] * LAYERS
        assert summary.overlap_share == 0
