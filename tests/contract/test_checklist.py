"""Every item of the conformance checklist has a test: its number is in the test's name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ITEMS = 88


def numbers(name: str) -> set[int]:
    """The items of a name like ``test_c24_c28_keys``."""
    match = re.match(r"test((?:_c\d{2})+)_", name)
    return set() if match is None else {int(part) for part in match[1].split("_c")[1:]}


def test_all_numbers_are_there() -> None:
    found: set[int] = set()
    for folder in ("contract", "integration"):
        for path in (TESTS / folder).glob("test_*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    found |= numbers(node.name)
    assert found == set(range(1, ITEMS + 1))
