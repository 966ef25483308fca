"""How many examples a model test runs, and how a failure can be repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings

Test = TypeVar("Test", bound=Callable[..., object])

# New examples at every run, so that many runs see more than one; a failure prints the decorator
# that repeats it. `make fuzz` multiplies their number, and sanitizers lower it.
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
_FACTOR = float(os.environ.get("LLMDD_EXAMPLES_FACTOR", "1"))


CI = settings.get_profile("ci")

# For a test that puts a fault in and wants the failure: nothing is shrunk or kept for later. The
# examples are the same at every run: how many it takes to show a rare fault varies a hundredfold,
# and a test's time is limited.
FAULT_WANTED = settings(
    CI,
    derandomize=True,
    max_examples=2000,
    phases=[Phase.generate],
    database=None,
    print_blob=False,
    report_multiple_bugs=False,
)


def examples(count: int) -> settings:
    return settings(CI, max_examples=max(1, int(count * _FACTOR)))
