"""Set-up of the fault scenarios: engines and pairs of tests/scripted, and a wire between them."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripted"))

from engine_fixtures import make_engine, make_pair  # found by the line above

__all__ = ["make_engine", "make_pair"]

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        # torch's own use of torch.jit, met while vLLM imports torch's compiler.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        import harness  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this directory as scripted."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.scripted)
