"""Option ``trace_dir`` with vLLM's scheduler: the pull flow's picture is complete."""

from __future__ import annotations

from pathlib import Path

from pairs import MakePair, prompt_of

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import merge
from vllm_llmdd_connector.trace.reader import read_file
from vllm_llmdd_connector.trace.summary import summarize


def test_pull_is_seen_from_p_s_first_step_to_d_s_first_decode(
    make_pair: MakePair, tmp_path: Path
) -> None:
    folder = tmp_path / "traces"
    pair = make_pair(extra_config={"trace_dir": str(folder)})
    prompt = prompt_of(100)
    assert pair.is_right(prompt, pair.transfer(prompt))
    pair.finish()
    for engine in (pair.p, pair.d):
        engine.close()
    processes = sorted(read_file(path).process for path in folder.iterdir())
    assert processes == ["rank 0", "rank 0", "scheduler", "scheduler"]
    (request,) = merge(read_all([folder]))
    assert request.flow == "pull"
    assert request.num_tokens == 100
    order = ["admitted", "allocated", "pull", "release", "arrival", "decode"]
    times = [request.moments[name] for name in order]
    assert times == sorted(times)
    assert request.last_computed_ns is not None
    assert request.last_computed_ns <= request.moments["admitted"]
    summary = summarize(request)
    assert summary.num_bytes == sum(summary.layer_bytes) > 0
    assert summary.overlap_share == 0


def test_handshake_tells_d_how_far_p_s_clock_is(make_pair: MakePair, tmp_path: Path) -> None:
    pair = make_pair(extra_config={"trace_dir": str(tmp_path)})
    # P's scheduler has a clock of its own in these tests.
    pair.p_clock.now_s = -5000.0
    pair.transfer(prompt_of(20))
    pair.finish()
    for engine in (pair.p, pair.d):
        engine.close()
    files = {(f.facts["role"], f.process): f for f in read_all([tmp_path])}
    d_file = files["kv_consumer", "scheduler"]
    (clock,) = {
        (event.at_ns, event.args["instance"], event.args["offset_s"], event.args["error_s"])
        for event in d_file.events
        if event.name == "clock"
    }
    at_ns, instance, offset_s, error_s = clock
    assert instance == files["kv_producer", "scheduler"].facts["instance"]
    assert abs(at_ns / 1e9 + offset_s + 5000) <= 2 * error_s + 0.5
    assert error_s > 0
