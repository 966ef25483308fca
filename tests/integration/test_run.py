"""``python -m vllm_llmdd_connector.datadist run``: programs for ``llm_datadist``, unmodified."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
RUN = [sys.executable, "-m", "vllm_llmdd_connector.datadist", "run"]
PATIENCE_S = 100


def environment(*first: Path) -> dict[str, str]:
    path = [*map(str, first), *filter(None, sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run(*arguments: object, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        env=environment(*path),
    )


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def listening() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts one side of a script; it lives until the test ends."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*RUN, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    """Returns when the script says that the other side may come."""
    assert process.stdout is not None
    assert process.stdout.readline() == "registered\n"
    return process


class TestTwoProcesses:
    def test_c88_pull_blocks(
        self, listening: Callable[..., subprocess.Popen[str]], port: int
    ) -> None:
        name = SCRIPTS / "pull_blocks.py"
        p = ready(listening(name, "--cluster-id", 1, "--port", port))
        d = run(name, "--device-id", 1, "--cluster-id", 2, "--port", port)
        assert (d.returncode, d.stdout) == (0, "pulled\n"), d.stderr
        p.communicate("\n", PATIENCE_S)
        assert p.returncode == 0

    def test_c88_push_blocks(
        self, listening: Callable[..., subprocess.Popen[str]], port: int
    ) -> None:
        name = SCRIPTS / "push_blocks.py"
        d = ready(listening(name, "decoder", port))
        p = run(name, "prompt", port)
        assert (p.returncode, p.stdout) == (0, "no such cache\n"), p.stderr
        values, _ = d.communicate("\n", PATIENCE_S)
        assert values == "[[70, 0, 70, 0], [71, 1, 71, 1]]\n"
        assert d.returncode == 0

    def test_c88_layers_over_a_rank_table(
        self, listening: Callable[..., subprocess.Popen[str]]
    ) -> None:
        script, name = SCRIPTS / "transfer_layers.py", uuid.uuid4()
        p, d = listening(script, 1, name), listening(script, 2, name)
        assert ready(p).stdout.readline() == "True\n"
        values, _ = ready(d).communicate("\n", PATIENCE_S)
        layers = [[10 + layer, 0, 10 + layer, 0] for layer in range(3) for _ in range(2)]
        assert values == f"{layers}\n"
        p.communicate("\n", PATIENCE_S)
        assert (p.returncode, d.returncode) == (0, 0)

    def test_c88_allocated_rows_of_the_first_generation(
        self, listening: Callable[..., subprocess.Popen[str]], port: int
    ) -> None:
        script = SCRIPTS / "allocated_rows.py"
        p = ready(listening(script, "prompt", port))
        d = run(script, "decoder", port)
        assert (d.returncode, d.stdout) == (0, "True\naAbBcCdD\n"), d.stderr
        p.communicate("\n", PATIENCE_S)
        assert p.returncode == 0


class TestLikePython:
    def test_arguments_folder_main_and_exit_code(
        self, script: Callable[[str], Path], tmp_path: Path
    ) -> None:
        (tmp_path / "beside.py").write_text("VALUE = 5")
        path = script(
            "import sys, pickle, beside, __main__\n"
            "class Thing: pass\n"
            "assert __name__ == '__main__' and __file__ == sys.argv[0]\n"
            "assert __main__.Thing is Thing\n"
            "assert type(pickle.loads(pickle.dumps(Thing()))) is Thing\n"
            "assert 'torch' not in sys.modules\n"
            "def f(x: int): pass\n"
            "assert f.__annotations__ == {'x': int}\n"
            "print(sys.argv[1:])\n"
            "sys.exit(beside.VALUE)\n"
        )
        done = run(path, "run", "--help", "-x", "--")
        assert done.stdout == "['run', '--help', '-x', '--']\n", done.stderr
        assert done.returncode == 5

    def test_traceback_has_only_the_script_s_frames(self, script: Callable[[str], Path]) -> None:
        path = script("def f():\n    raise ValueError('of the script')\nf()\n")
        done = run(path)
        plain = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == plain.returncode == 1
        assert done.stderr == plain.stderr

    def test_syntax_error_reads_as_ever(self, script: Callable[[str], Path]) -> None:
        done = run(script("x = = 1\n"))
        assert done.returncode == 1
        assert done.stderr.endswith("SyntaxError: invalid syntax\n")
        assert "vllm_llmdd_connector" not in done.stderr

    def test_refusals_of_the_engine_reach_the_script(self, script: Callable[[str], Path]) -> None:
        done = run(
            script(
                "import llm_datadist as l\n"
                "try: l.LLMConfig().link_retry_count = 0\n"
                "except l.LLMException as e: print(e.status_code == "
                "l.LLMStatusCode.LLM_PARAM_INVALID)\n"
                "l.missing\n"
            )
        )
        assert done.stdout == "True\n"
        assert done.stderr.endswith(
            "AttributeError: module 'llm_datadist' has no attribute 'missing'\n"
        )


class TestNames:
    def test_every_module_path_leads_to_the_same_objects(
        self, script: Callable[[str], Path]
    ) -> None:
        done = run(
            script(
                "import importlib, importlib.util\n"
                "import llm_datadist, vllm_llmdd_connector.datadist as ours\n"
                "import llm_datadist.v2.cache_manager\n"
                "from vllm_llmdd_connector.datadist.cache_manager import CacheManager\n"
                "assert llm_datadist.v2.cache_manager.CacheManager is CacheManager\n"
                "assert importlib.util.find_spec('llm_datadist') is not None\n"
                "for name in ('configs', 'data_type', 'status', 'utils.log', 'utils.utils',\n"
                "             'v2.config', 'v2.llm_datadist', 'v2.llm_types', 'v2.llm_utils'):\n"
                "    module = importlib.import_module('llm_datadist.' + name)\n"
                "    assert module.__name__ == 'llm_datadist.' + name\n"
                "    assert module.LLMException is ours.LLMException, name\n"
                "from llm_datadist.status import LLMStatusCode\n"
                "from llm_datadist.data_type import DataType\n"
                "from llm_datadist.configs import LLMRole, LLMConfig, LLMClusterInfo\n"
                "from llm_datadist import *\n"
                "assert Cache is ours.Cache and LLMRole is ours.LLMRole\n"
                "assert KvCacheManager is ours.KvCacheManager\n"
                "try: import llm_datadist.nothing\n"
                "except ModuleNotFoundError as e: print(e)\n"
            )
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "No module named 'llm_datadist.nothing'\n"

    def test_real_vendor_package_is_not_used(
        self, script: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = tmp_path / "installed"
        folder.mkdir()
        (folder / "llm_datadist.py").write_text("raise SystemExit('the vendor was imported')")
        done = run(script("import llm_datadist; print(llm_datadist.LLMRole.MIX)"), path=(folder,))
        assert done.stdout == "LLMRole.MIX\n", done.stderr

    def test_nothing_is_active_otherwise(self) -> None:
        code = (
            "import sys, torch, vllm_llmdd_connector.datadist\n"
            "import vllm_llmdd_connector.datadist.script\n"
            "print(hasattr(torch, 'npu'), hasattr(torch.Tensor, 'npu'), 'llm_datadist' in "
            "sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout == "False False False\n"


class TestNpuNames:
    def test_host_stands_for_the_device(self, script: Callable[[str], Path]) -> None:
        done = run(
            script(
                "import torch\n"
                "host = torch.zeros(3)\n"
                "device = host.npu()\n"
                "host[0] = 1\n"
                "copy = device.cpu()\n"
                "device[1] = 2\n"
                "assert host.tolist() == [1, 0, 0] and copy.tolist() == [0, 0, 0]\n"
                "assert device.cpu().tolist() == [0, 2, 0]\n"
                "for name in (1, 'npu:2', torch.device('cpu', 0)):\n"
                "    torch.npu.set_device(name)\n"
                "    print(torch.npu.current_device())\n"
                "import torch_npu\n"
                "assert torch_npu.npu is torch.npu and torch.npu.is_available()\n"
                "torch.npu.synchronize(); torch.npu.empty_cache()\n"
                "assert torch.__spec__.loader is torch.__loader__\n"
                "torch.npu.memory_stats()\n"
            )
        )
        assert done.stdout == "1\n2\n0\n", done.stderr
        assert "AttributeError: torch.npu.memory_stats has no counterpart" in done.stderr

    def test_device_npu_is_host_memory(self, script: Callable[[str], Path]) -> None:
        done = run(
            script(
                "import torch\n"
                "for device in ('npu', 'npu:1', torch.device('npu', 1)):\n"
                "    a = torch.ones(2, 3, device=device)\n"
                "    b = a.to(device)\n"
                "    c = torch.zeros_like(a, device=device).to(device=device, dtype=torch.int8)\n"
                "    b[0] = 5\n"
                "    assert a.sum() == 6 and b.sum() == 18 and c.dtype == torch.int8\n"
                "    assert {t.device.type for t in (a, b, c)} == {'cpu'}\n"
                "    assert torch.tensor([1.5], device=device).to(torch.int32).tolist() == [1]\n"
                "assert torch.zeros(1, device='cpu').device.type == 'cpu'\n"
                "print('done')\n"
            )
        )
        assert done.stdout == "done\n", done.stderr

    def test_real_torch_npu_is_left_alone(
        self, script: Callable[[str], Path], tmp_path: Path
    ) -> None:
        folder = tmp_path / "installed"
        folder.mkdir()
        (folder / "torch_npu.py").write_text("VALUE = 'real'")
        (folder / "torch.py").write_text("class Tensor: pass")
        path = script(
            "import torch, torch_npu; print(torch_npu.VALUE, hasattr(torch.Tensor, 'npu'))"
        )
        assert run(path, path=(folder,)).stdout == "real False\n"

    @pytest.mark.parametrize("statement", ["import torch", "import torch_npu"])
    def test_missing_torch_is_said_when_the_script_needs_it(
        self, script: Callable[[str], Path], tmp_path: Path, statement: str
    ) -> None:
        folder = tmp_path / "installed"
        folder.mkdir()
        (folder / "torch.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
        )
        done = run(script(f"print('begun')\n{statement}\n"), path=(folder,))
        assert (done.returncode, done.stdout) == (1, "begun\n")
        assert "The script needs torch, which is not installed here" in done.stderr

    def test_processes_of_a_gloo_group_meet(self, script: Callable[[str], Path], port: int) -> None:
        """A barrier asks for the accelerator, and the name ``npu`` alone made that an error."""
        done = run(
            script(
                "import torch, torch.distributed as group\n"
                f"address = 'tcp://127.0.0.1:{port}'\n"
                "group.init_process_group('gloo', init_method=address, rank=0, world_size=1)\n"
                "group.barrier()\n"
                "group.destroy_process_group()\n"
                "print('met')\n"
            )
        )
        assert done.stdout == "met\n", done.stderr


class TestDeviceAddresses:
    SCRIPT = (
        "import os, subprocess\n"
        "for arguments in ('-i 0 -ip -g', '-i 7 -ip -g', '-i x -ip -g', '-i 0 -link -g'):\n"
        "    done = subprocess.run(['hccn_tool', *arguments.split()], capture_output=True)\n"
        "    print(done.returncode, done.stdout.decode().split())\n"
    )

    def test_stand_in_answers_with_loopback_addresses(self, script: Callable[[str], Path]) -> None:
        done = run(script(self.SCRIPT))
        assert done.stdout.splitlines() == [
            "0 ['ipaddr:127.0.0.1', 'netmask:255.0.0.0']",
            "0 ['ipaddr:127.0.0.8', 'netmask:255.0.0.0']",
            "1 []",
            "1 []",
        ], done.stderr

    def test_it_leaves_nothing_behind(self, script: Callable[[str], Path]) -> None:
        done = run(script("import shutil; print(shutil.which('hccn_tool'))"))
        assert done.returncode == 0
        assert not Path(done.stdout.strip()).exists()

    def test_real_tool_is_used(
        self, script: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tool = tmp_path / "hccn_tool"
        tool.write_text("#!/bin/sh\necho real\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert run(script(self.SCRIPT)).stdout.splitlines() == ["0 ['real']"] * 4


class TestCommand:
    def test_missing_script_is_one_sentence(self, tmp_path: Path) -> None:
        done = run(tmp_path / "no.py")
        assert done.returncode == 2
        assert done.stderr == (
            f"python -m vllm_llmdd_connector.datadist run: cannot read script "
            f"'{tmp_path}/no.py': No such file or directory\n"
        )
        assert "Is a directory" in run(tmp_path).stderr

    def test_help_names_what_is_provided(self) -> None:
        done = run("--help")
        assert done.returncode == 0
        for word in ("SCRIPT", "llm_datadist", "tensor.npu()", "exit code"):
            assert word in done.stdout

    def test_no_command_shows_the_usage(self) -> None:
        done = subprocess.run(
            RUN[:-1], capture_output=True, text=True, check=False, env=environment()
        )
        assert done.returncode == 2
        assert done.stderr.startswith("usage: python -m vllm_llmdd_connector.datadist")
