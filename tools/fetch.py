"""Run pip for the set-up: retries, quiet progress, and the choice of torch's CPU build."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

TORCH = "torch==2.13.0+cpu"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's own index of CPU wheels: PyPI carries only the CUDA build under this version."""

_ATTEMPTS = 3
_LOG_TAIL = 25


class SetupError(Exception):
    """The set-up cannot go on; the text says why and what to do."""


class Pip:
    """pip of one environment: its output goes to a log file, short progress to the terminal."""

    def __init__(self, python: Path, log: Path) -> None:
        self._python = python
        self._log = log

    def install(self, title: str, *args: str) -> None:
        """Install, repeating the whole command: pip keeps what it fetched, so that is cheap."""
        self._retry(title, "install", "--no-deps", *args)

    def download(self, title: str, *args: str) -> None:
        self._retry(title, "download", "--no-deps", *args)

    def install_torch(self) -> None:
        """Install torch's CPU build from what pip has configured, else from PyTorch's CPU index.

        The local version `+cpu` is spelled out, so that neither place can hand out a CUDA build.
        """
        title = f"{TORCH} (about 190 MB)"
        if self._run(title, "install", "--no-deps", TORCH) != 0:
            print(f"  pip's configured places have no {TORCH}; using {TORCH_CPU_INDEX}", flush=True)
            self._retry(title, "install", "--no-deps", "--index-url", TORCH_CPU_INDEX, TORCH)

    def _retry(self, title: str, *args: str) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            if self._run(title, *args) == 0:
                return
            if attempt < _ATTEMPTS:
                print(f"  pip failed, attempt {attempt} of {_ATTEMPTS}; trying again", flush=True)
                time.sleep(3 * attempt)
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
        raise SetupError(f"pip failed {_ATTEMPTS} times at: {title}. End of {self._log}:\n{tail}")

    def _run(self, title: str, *args: str) -> int:
        command = [
            str(self._python),
            "-m",
            "pip",
            "--no-input",
            "--disable-pip-version-check",
            *args,
        ]
        env = dict(os.environ, PYTHONUNBUFFERED="1")
        env.setdefault("PIP_DEFAULT_TIMEOUT", "60")
        env.setdefault("PIP_RETRIES", "8")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as log, Progress(title) as progress:
            log.write(f"\n$ {' '.join(command)}\n")
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    log.write(line)
                    progress.see(line)
            progress.end("done" if process.returncode == 0 else "failed")
            return process.returncode


class Progress:
    """A step's progress: a line that is rewritten on a terminal, a line every 20 s elsewhere."""

    _FILE = re.compile(
        r"\s*(?:Downloading|Processing|Using cached) (\S+)(?: \(([\d.]+ [kMG]?B)\))?"
    )

    def __init__(self, title: str) -> None:
        self._title = title
        self._tty = sys.stdout.isatty()
        self._files = 0
        self._now = ""
        self._start = time.monotonic()
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        print(f"  {self._title}", flush=True)
        self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._ticker.join()

    def see(self, line: str) -> None:
        match = self._FILE.match(line)
        if match:
            self._files += 1
            name = Path(match.group(1)).name
            self._now = f"{name} ({match.group(2)})" if match.group(2) else name
        elif line.startswith("Installing collected packages"):
            self._now = "unpacking"
        elif line.startswith("Building"):
            self._now = line.strip()

    def end(self, verdict: str) -> None:
        self._stop.set()
        clear = "\r\033[K" if self._tty else ""
        packages = f", {self._files} package(s)" if self._files else ""
        print(f"{clear}    {verdict} in {self._seconds()} s{packages}", flush=True)

    def _tick(self) -> None:
        while not self._stop.wait(1 if self._tty else 20):
            line = (
                f"    {self._seconds()} s, {self._files} package(s), now {self._now or 'resolving'}"
            )
            print(
                f"\r\033[K{line[:100]}" if self._tty else line,
                end="" if self._tty else "\n",
                flush=True,
            )

    def _seconds(self) -> int:
        return round(time.monotonic() - self._start)


def run_checked(command: Sequence[str], what: str) -> str:
    """Run a short command and return its output; a SetupError carries the output of a failure."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        raise SetupError(f"{what} failed:\n{(run.stdout + run.stderr).strip()}")
    return run.stdout.strip()
