"""Time for tests: a clock to move by hand, and waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 20.0
"""Long enough for a loaded machine; a test that passes never waits so long."""


class FakeClock:
    """Call it for the time in seconds."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Return as soon as ``condition`` holds; fail the test with ``what`` when it never does."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.002)
