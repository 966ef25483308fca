"""The benchmarks' modules, which import each other as scripts do."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def bench_modules(*names: str) -> Iterator[dict[str, Any]]:
    """By name; what they import while they run is found until the end."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))
