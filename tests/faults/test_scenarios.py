"""Every known way in which connectors of vLLM have failed has a test, found by its number and kind.

Most are in this folder; where a suite of its own shows a scenario, its test has the number.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
KINDS = ("hang", "leak", "wrong_output", "crash", "refused", "metrics", "cost")
NAME = re.compile(rf"test((?:_s\d{{2}})+)_({'|'.join(KINDS)})_")
SCENARIOS = {
    "a request at D without an end": [1, 2, 3, 4, 5, 7, 8, 9, 10],
    "blocks, leases and links that stay": [11, 12, 14, 15, 17],
    "other bytes than the prompt's": [*range(18, 29)],
    "an engine core that ends": [29, 30, 33, 34, 36],
    "topologies and configurations": [37, 38, 39, 40],
    "restarts, figures, limits": [41, 42, 43, 44, 45],
}


def names() -> list[str]:
    """Of all tests that begin like a scenario's."""
    return [
        name
        for path in sorted(TESTS.rglob("test_*.py"))
        for name in re.findall(r"^ *def (test_s\d\w*)", path.read_text(), re.MULTILINE)
    ]


def test_every_scenario_has_its_test() -> None:
    found = {int(number) for name in names() for number in re.findall(r"_s(\d{2})(?=_)", name)}
    assert found == {number for numbers in SCENARIOS.values() for number in numbers}


def test_every_name_says_its_kind() -> None:
    assert [name for name in names() if not NAME.match(name)] == []
