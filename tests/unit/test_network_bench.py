"""benchmarks/bench_network.py where no servers are needed: what it needs, and what it writes."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.bench_modules import BENCHMARKS, bench_modules

TOKENS, TOKEN_BYTES = 512, 1024
KV_BYTES = TOKENS * TOKEN_BYTES


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with bench_modules("bench_network") as modules:
        yield modules["bench_network"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "num_attention_heads": 8,
        "hidden_size": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_machine_without_iproute2_gets_a_sentence_and_no_lines(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_network.py"), "--quick"]
    run = subprocess.run(
        command,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 77
    assert run.stdout == ""
    assert run.stderr.startswith("bench_network: ")
    assert len(run.stderr.splitlines()) == 1


def test_missing_programs_are_named(network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    netns = importlib.import_module("netns")
    monkeypatch.setattr(netns.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(netns.UnavailableError, match="iproute2's ip and tc"):
        netns.check_available()
    monkeypatch.setattr(netns.os, "geteuid", lambda: 1000)
    with pytest.raises(netns.UnavailableError, match="need root"):
        netns.check_available()


def test_kv_of_a_token_is_keys_and_values_of_all_layers(network: Any, model: Path) -> None:
    assert network.kv_bytes_per_token(model) == 2 * 4 * 2 * 32 * 2 == TOKEN_BYTES


class TestLines:
    def report(
        self, network: Any, model: Path, link_bytes: dict[str, float], times: dict[str, Any]
    ) -> bool:
        options = network.Options(list(link_bytes), {TOKENS: 1}, 1, 1000, 512, model)
        arms = [network.Arm(name, "", []) for name in link_bytes]
        cases = {
            (name, TOKENS): network.Case([network.Sample(name, 200.0, 1.0, 1.0)], [seen])
            for name, seen in link_bytes.items()
        }
        reporter = importlib.import_module("report").Report()
        return bool(network.report_cases(reporter, options, arms, cases, times, 125.0))

    def lines(self, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
        return [json.loads(text) for text in capsys.readouterr().out.splitlines()]

    def test_transfer_that_took_another_way_has_none(
        self, network: Any, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seen = {"pull": KV_BYTES - 1.0, "nixl": KV_BYTES + 1.0}
        assert not self.report(network, model, seen, {})
        assert [line["arm"] for line in self.lines(capsys)] == ["nixl"]

    def test_ratios_are_to_nixl(
        self, network: Any, model: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        seen = {"push": KV_BYTES + 1.0, "nixl": KV_BYTES + 1.0}
        times = {"cmpl-push-0": network.Timed(1.0, 2.0), "cmpl-nixl-0": network.Timed(4.0, 8.0)}
        assert self.report(network, model, seen, times)
        push, nixl = self.lines(capsys)
        assert push["last_layer_to_decode/nixl"]["p50"] == 0.25
        assert push["exposed_ms"]["p50"] == 1.0
        assert nixl["ttft/nixl"]["p50"] == 1.0
        assert push["link_ms"] == round(KV_BYTES / 125_000, 1)
