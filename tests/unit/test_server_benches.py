"""What the benches of real servers read and compute, without a server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.bench_modules import bench_modules

MODULES = ("server_options", "server_requests", "server_idle", "server_load")


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    with bench_modules(*MODULES) as modules:
        yield modules


class TestLengths:
    def test_turns_by_prompt_length(self, bench: dict[str, Any]) -> None:
        parse_lengths = bench["server_options"].parse_lengths
        assert parse_lengths("512:9,6000:3") == {512: 9, 6000: 3}

    @pytest.mark.parametrize("text", ["", "512", "512:", "512:0", "0:9", "512:9,", "a:9"])
    def test_what_is_no_length_is_named(self, bench: dict[str, Any], text: str) -> None:
        parse_lengths = bench["server_options"].parse_lengths
        with pytest.raises(argparse.ArgumentTypeError, match="is not TOKENS:TURNS"):
            parse_lengths(text)


class TestTimes:
    """Of vLLM's NIXL connectors, as timed_nixl.py writes them."""

    def events(self, folder: Path, name: str, *events: tuple[str, int, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = ({"name": n, "at_ns": at, "request": request} for n, at, request in events)
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def test_last_layer_is_the_last_before_the_arrival(
        self, bench: dict[str, Any], tmp_path: Path
    ) -> None:
        requests = bench["server_requests"]
        computed = [("computed", at * 1_000_000, "") for at in (10, 20, 90)]
        self.events(tmp_path / "nixl", "p", *computed)
        self.events(tmp_path / "nixl", "d", ("arrival", 25_000_000, "cmpl-a-0"))
        self.events(tmp_path / "nixl", "s", ("decode", 27_000_000, "cmpl-a-0"))
        times = requests.read_times(tmp_path)
        assert requests.time_of(requests.Sample("a", 1, 1, 1), times) == requests.Timed(5, 7)
        assert requests.time_of(requests.Sample("b", 1, 1, 1), times) is None

    def test_request_without_its_decode_has_no_times(
        self, bench: dict[str, Any], tmp_path: Path
    ) -> None:
        self.events(tmp_path / "nixl", "p", ("computed", 1, ""), ("arrival", 2, "cmpl-a-0"))
        assert bench["server_requests"].read_times(tmp_path) == {}


class TestIdle:
    """Processor time by thread."""

    def test_main_thread_is_apart(self, bench: dict[str, Any]) -> None:
        idle = bench["server_idle"]
        before = {7: 1_000, 8: 5_000}
        after = {7: 1_500, 8: 5_100, 9: 100}
        assert idle.split(7, before, after, 1_000) == (50.0, 20.0)

    @pytest.mark.parametrize(
        ("titles", "worker"),
        [
            (("vllm serve", "VLLM::EngineCore", "VLLM::Worker_TP0"), 2),
            (("vllm serve", "VLLM::EngineCore"), 1),
        ],
    )
    def test_worker_is_found_by_its_title(
        self, bench: dict[str, Any], tmp_path: Path, titles: tuple[str, ...], worker: int
    ) -> None:
        for pid, title in enumerate(titles):
            (tmp_path / str(pid)).mkdir()
            (tmp_path / str(pid) / "cmdline").write_text(title.replace(" ", "\0"))
        idle = bench["server_idle"]
        assert idle.worker_of(range(len(titles)), tmp_path) == worker


class TestLoad:
    """What is read from the result of vLLM's client."""

    @pytest.fixture
    def load(self, bench: dict[str, Any]) -> Any:
        return bench["server_load"]

    def result(self, **fields: Any) -> dict[str, Any]:
        return {
            "completed": 2,
            "errors": ["", ""],
            "total_output_tokens": 4,
            "start_times": [10.0, 11.0],
            "ttfts": [0.5, 0.25],
            "itls": [[0.5], [0.75]],
            **fields,
        }

    def test_figures_are_from_the_first_request_to_the_last_answer(self, load: Any) -> None:
        log = load.CpuLog(lambda: 0.0)
        for time_s, used_s in ((0.0, 1.0), (10.0, 5.0), (12.0, 8.0), (20.0, 50.0)):
            log.add(time_s, used_s)
        sample = load.read_result(self.result(), load.Load(1, 2, 512, 2), log)
        assert sample.requests_per_s == 1.0
        assert sample.cpu_s_per_request == 1.5
        assert sample.first_token_ms == [500.0, 250.0]
        assert sample.inter_token_ms == [500.0, 750.0]

    def test_failed_request_ends_it(self, load: Any) -> None:
        result = self.result(completed=1, errors=["", "Bad Gateway"])
        with pytest.raises(load.LoadError, match="1 of 2 requests succeeded: Bad Gateway"):
            load.read_result(result, load.Load(1, 2, 512, 2), load.CpuLog(lambda: 0.0))

    def test_short_answer_ends_it(self, load: Any) -> None:
        with pytest.raises(load.LoadError, match="3 of 4 tokens"):
            load.read_result(
                self.result(total_output_tokens=3),
                load.Load(1, 2, 512, 2),
                load.CpuLog(lambda: 0.0),
            )
