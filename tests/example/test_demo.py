"""The demo as a user runs it: two real servers, every prompt right, nothing left running."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "disaggregated_prefill" / "demo.py"


@pytest.mark.e2e
@pytest.mark.timeout(1200)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
def test_every_prompt_is_right_and_every_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--work-dir", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1180)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "14 of 14 prompts right" in run.stdout
    assert run.stdout.count("right") >= 15  # each row's verdict, and the summary
    assert _processes_naming(tmp_path) == []


def _processes_naming(folder: Path) -> list[str]:
    """The command lines that name `folder`; both servers' do, for their digests."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--model", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert f"no model in {tmp_path}; `make demo` makes one" in run.stderr
