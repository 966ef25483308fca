"""The page that maps log lines and metrics to causes has all of them, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from vllm_llmdd_connector.metrics import COUNTERS, DURATIONS, STAGES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_llmdd_connector"
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
LOUD = frozenset({"warning", "error", "exception", "critical", "log"})
"""``logger.log`` has a level that varies; such a line may be loud."""


def rows(heading: str) -> list[list[str]]:
    """The cells of the table rows below a heading, without the table's own head."""
    section = PAGE.split(
        f"\n## {heading}\n" if f"\n## {heading}\n" in PAGE else f"\n### {heading}\n"
    )
    lines = re.split(r"\n##+ ", section[1])[0].splitlines()
    table = [line.strip("|").split(" | ") for line in lines if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in table[1:]]


def loud_lines(source: str) -> Iterator[str]:
    """Formats of the warnings and errors that a file may log, with … for what varies."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LOUD
            and ast.unparse(node.func.value).endswith("logger")
        ):
            text = node.args[1 if node.func.attr == "log" else 0]
            assert isinstance(text, ast.Constant), f"not a literal: {ast.unparse(node)}"
            yield re.sub(r"%(\.\d+)?[a-z]", "…", str(text.value))


def names(heading: str) -> list[str]:
    """What stands in back quotes in the first cells of a table."""
    return [name for row in rows(heading) for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_loud_line_is_on_the_page_once() -> None:
    logged = {
        line for path in sorted(PACKAGE.rglob("*.py")) for line in loud_lines(path.read_text())
    }
    listed = [line for side in ("D", "P", "both") for line in names(f"Log lines of {side}")]
    assert sorted(listed) == sorted(logged)


def test_every_stage_counter_and_histogram_is_on_the_page_once() -> None:
    assert names("Failures by stage") == list(STAGES)
    assert sorted(names("Counters")) == sorted(COUNTERS)
    assert sorted(names("Histograms")) == sorted(DURATIONS)


def test_every_row_has_cause_and_remedy() -> None:
    headings = ["Log lines of D", "Log lines of P", "Log lines of both"]
    headings += ["Failures by stage", "Counters", "Histograms"]
    assert [row for heading in headings for row in rows(heading) if len(row) != 3] == []
    assert [row for heading in headings for row in rows(heading) if not all(row)] == []


def test_a_line_that_is_missing_would_be_noticed() -> None:
    source = (
        "logger.warning('peer %x: new words %.1f', a, b)\n"
        "logger.debug('quiet')\n"
        "self.logger.exception('torn')\n"
        "logger.log(level, 'perhaps %s:%d', *a)\n"
    )
    assert list(loud_lines(source)) == ["peer …: new words …", "torn", "perhaps …:…"]


def test_links_of_the_page_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        text = (ROOT / "docs" / path).read_text() if path else PAGE
        titles = [re.sub(r"[^\w -]", "", t).lower() for t in re.findall(r"^#+ (.*)$", text, re.M)]
        assert not anchor or anchor in [title.replace(" ", "-") for title in titles], target


def test_readme_links_it() -> None:
    assert "(docs/troubleshooting.md)" in (ROOT / "README.md").read_text()
