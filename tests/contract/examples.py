"""How many examples a model test runs, and how a failure can be repeated."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from hypothesis import HealthCheck, settings

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


def examples(count: int) -> settings:
    return settings(CI, max_examples=max(1, int(count * _FACTOR)))
