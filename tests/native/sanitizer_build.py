"""Builds of the engine with sanitizers, each in a folder of its own that is used again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = ROOT / "build" / "sanitized"
THREAD = ROOT / "build" / "tsan"
_FLAGS = {ADDRESS: "address,undefined", THREAD: "thread"}


def build(folder: Path, *targets: str) -> None:
    """Build these targets, or everything. cmake and ninja may come from this Python's folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path}
    configure = [
        *("cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"),
        *(f"-DLLMDD_SANITIZE={_FLAGS[folder]}", "-DLLMDD_NATIVE_TESTS=ON"),
        *("-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DPython_EXECUTABLE={sys.executable}"),
    ]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, env=environment)
    wanted = ["--target", *targets] if targets else []
    subprocess.run(["cmake", "--build", str(folder), *wanted], check=True, env=environment)


def program(folder: Path, name: str) -> Path:
    return folder / "tests" / "native" / "cpp" / name


def compiler_supports(flags: str) -> bool:
    """Whether a program with these sanitizers can be compiled, linked and started."""
    folder = ROOT / "build"
    folder.mkdir(exist_ok=True)
    output = folder / f"probe-{flags}"
    command = ["g++", f"-fsanitize={flags}", "-x", "c++", "-", "-o", str(output)]
    compiled = subprocess.run(command, input="int main() {}", text=True, stderr=subprocess.DEVNULL)
    started = compiled.returncode == 0 and (
        subprocess.run([*same_addresses(), str(output)], stderr=subprocess.DEVNULL).returncode == 0
    )
    output.unlink(missing_ok=True)
    return started


def same_addresses() -> list[str]:
    """The thread sanitizer of older compilers cannot start where the kernel spreads addresses
    further than it expects."""
    setarch = shutil.which("setarch")
    return [setarch, "--addr-no-randomize"] if setarch else []
