"""What importing costs: vLLM's frontend and machines without any of it import these modules."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_llmdd_connector

PACKAGE = Path(vllm_llmdd_connector.__file__).parent
UNWANTED = ("torch", "torch_npu", "llm_datadist", "vllm_llmdd_connector.datadist")

HEAVY = ("vllm", "torch", "torch_npu", "llm_datadist", "numpy", "zmq")
PURE = (
    "config",
    "errors",
    "ids",
    "params",
    "control.messages",
    "control.session",
    "layout.kv_layout",
    "scheduler.block_map",
    "scheduler.lease",
)


def imported_by(statement: str, unwanted: tuple[str, ...]) -> set[str]:
    """Which of the unwanted modules a fresh interpreter has after ``statement``."""
    script = f"{statement}\nimport sys\nprint(*(m for m in {unwanted!r} if m in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_package_pulls_in_nothing() -> None:
    assert imported_by("import vllm_llmdd_connector", (*HEAVY, "msgspec")) == set()


@pytest.mark.skipif(
    importlib.util.find_spec("vllm_llmdd_connector.datadist") is None,
    reason="the LLM-DataDist API is not part of this installation",
)
def test_datadist_api_pulls_in_neither_vllm_nor_device_libraries() -> None:
    statement = "import vllm_llmdd_connector.datadist"
    assert imported_by(statement, HEAVY) == set()


def test_pure_parts_need_neither_vllm_nor_sockets() -> None:
    statement = "\n".join(f"import vllm_llmdd_connector.{name}" for name in PURE)
    assert imported_by(statement, HEAVY) == set()


def top_level_imports(tree: ast.Module) -> set[str]:
    """Modules imported when the file is; not those under ``if TYPE_CHECKING`` or in functions."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return names


def test_no_file_of_the_connector_imports_engine_or_device_libraries() -> None:
    """vLLM's frontend imports ``connector``; the engine is imported by the worker that needs it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if "datadist" in path.relative_to(PACKAGE).parts:
            continue
        for name in top_level_imports(ast.parse(path.read_text())):
            assert not name.startswith(UNWANTED), f"{path.name} imports {name}"
