"""Set-up of the simulator's tests: it stands on the scripted engine of tests/scripted."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from world_verdict import Verdict

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripted"))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        # torch's own use of torch.jit, met while vLLM imports torch's compiler.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        import world  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., Verdict]:
    """Run a world of few requests; further arguments replace what its seed has drawn."""
    from dataclasses import replace

    from plan import draw_settings
    from world import CAN_REPORT_WINDOWS, run_world

    def run(seed: str, num_requests: int = 60, **changes: Any) -> Verdict:
        settings = draw_settings(seed, num_requests, windows=CAN_REPORT_WINDOWS)
        return run_world(replace(settings, **changes), tmp_path)

    return run
