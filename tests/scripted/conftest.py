"""Set-up of the scripted tests: a real vLLM, imported without warnings, and engines that end."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import pytest
from engine_fixtures import make_engine, make_pair

__all__ = ["make_engine", "make_pair"]

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HAVE_VLLM = importlib.util.find_spec("vllm") is not None

if HAVE_VLLM:
    with warnings.catch_warnings():
        # torch's own use of torch.jit, met while vLLM imports torch's compiler.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
        import harness  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    """Say which vLLM the scripted tests run on, or that they are left out."""
    if not HAVE_VLLM:
        return "scripted: vLLM is not installed, tests/scripted is left out"
    import vllm

    return f"scripted: vLLM {vllm.__version__} from {Path(vllm.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this directory as scripted."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.scripted)
