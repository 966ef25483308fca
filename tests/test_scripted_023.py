"""Runs tests/scripted and tests/faults once more, on the Python files of vLLM 0.23.0.

One process can import one vLLM only, so this is a run of pytest in a process of its own. The files
need no compiled extension: nothing in the scripted tests computes a model.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

VERSION = "0.23.0"
ROOT = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.scripted,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM's dependencies are not installed"
    ),
]


def _tree() -> Path:
    """Folder that holds the ``vllm`` package of that version."""
    tree = Path(os.environ.get("SCRIPTED_VLLM_023", ROOT / ".cache" / f"vllm-{VERSION}")).resolve()
    if not (tree / "vllm" / "__init__.py").is_file():
        pytest.fail(
            f"no vLLM {VERSION} in {tree}: run the set-up target of the Makefile, "
            "or name its folder in SCRIPTED_VLLM_023"
        )
    return tree


def test_scripted_cases_pass_on_vllm_023(tmp_path: Path) -> None:
    tree, report = _tree(), tmp_path / "report.xml"
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {
        "PYTHONPATH": path,
        "SCRIPTED_VLLM_VERSION": VERSION,
        "SCRIPTED_VLLM_TREE": str(tree),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    folders = ["tests/scripted", "tests/faults"]
    command = [sys.executable, "-m", "pytest", *folders, f"--junitxml={report}"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--color=no"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"the run on vLLM {VERSION} failed:\n{run.stdout}"
    cases = ET.parse(report).getroot().findall(".//testcase")
    passed = {case.get("name") for case in cases if len(case) == 0}
    assert "test_the_version_asked_for_is_imported" in passed, run.stdout
    assert len(passed) > 1, run.stdout
    assert len(passed) > len(cases) // 2, f"most cases were skipped:\n{run.stdout}"


@pytest.mark.parametrize("content", ["nothing", "empty folder"])
def test_a_missing_tree_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    tree = tmp_path / "vllm"
    if content == "empty folder":
        tree.mkdir()
    monkeypatch.setenv("SCRIPTED_VLLM_023", str(tree))
    with pytest.raises(pytest.fail.Exception, match=r"no vLLM 0\.23\.0 in .*SCRIPTED_VLLM_023"):
        _tree()
