"""Every bench that starts no vLLM server still runs; its figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes.bench_modules import bench_modules

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("transfer", "steps", "datadist", "growth", "layer_overlap", "integrity")


@pytest.fixture(scope="module")
def runs() -> Any:
    """The record's first run of each name."""
    with bench_modules("record") as modules:
        record = modules["record"]
    return {run.name: run for run in reversed(record.RUNS)}


@pytest.mark.parametrize("name", NAMES)
def test_quick_run_writes_lines(runs: Any, name: str) -> None:
    command = runs[name].command(is_quick=True)
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    assert {line["bench"] for line in lines} == {name}


def test_only_benches_of_real_servers_are_left_out(runs: Any) -> None:
    assert runs.keys() - set(NAMES) == {"contact", "network", "servers"}
