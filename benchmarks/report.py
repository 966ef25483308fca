"""What all benches share: JSON lines on stdout, progress and tables on stderr, facts.

A figure is `{"p50": …, "p99": …, "n": …}` and its name carries the unit. p99 is the bad tail: 99 of
100 samples are as good or better, so it is the high end of a duration and the low end of a rate.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = [
    "CANNOT_RUN",
    "Report",
    "machine",
    "paired_ratios",
    "quantiles",
    "rate_quantiles",
    "revision",
    "versions",
]

CANNOT_RUN = 77
"""Exit status of a bench that this machine has not got what is needed for, as test runners use it:
it has said so in a sentence and written no lines."""
_VERSIONED = ("vllm", "torch", "nixl", "vllm-llmdd-connector")


def _figure(samples: Sequence[float], tail: float) -> dict[str, float | int]:
    if not samples:
        raise ValueError("a figure needs at least one sample")
    ordered = sorted(samples)

    def at(share: float) -> float:
        return float(f"{ordered[round(share * (len(ordered) - 1))]:.4g}")

    return {"p50": at(0.5), "p99": at(tail), "n": len(ordered)}


def quantiles(samples: Sequence[float]) -> dict[str, float | int]:
    """The figure of samples of which less is better."""
    return _figure(samples, 0.99)


def rate_quantiles(samples: Sequence[float]) -> dict[str, float | int]:
    """The figure of samples of which more is better."""
    return _figure(samples, 0.01)


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Each sample over the one of the same turn, so that what the machine did then cancels out."""
    return [upper / lower for upper, lower in zip(ours, theirs, strict=True)]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


@functools.cache
def machine() -> dict[str, Any]:
    """What the figures depend on besides the settings."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


@functools.cache
def versions() -> dict[str, str]:
    """Of the packages that figures depend on; one that is not installed is left out."""
    found = {}
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@functools.cache
def revision() -> str:
    """The commit the bench runs on, with `+` when files differ; empty outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    return commit + "+" if commit and git("status", "--porcelain", "-uno") else commit


class Report:
    """Where the results of one run go."""

    def line(self, bench: str, arm: str, **fields: Any) -> None:
        """One result: settings and figures as fields of one JSON line."""
        facts = {"revision": revision(), "versions": versions(), "machine": machine()}
        print(json.dumps({"bench": bench, "arm": arm, **fields, **facts}), flush=True)

    def progress(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """The first column is text, the others are numbers."""
        cells = [[str(cell) for cell in row] for row in [header, *rows]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
        for row in cells:
            rest = zip(row[1:], widths[1:], strict=True)
            numbers = [cell.rjust(width) for cell, width in rest]
            self.progress("  ".join([row[0].ljust(widths[0]), *numbers]))
