"""Result lines as benches print them and record.py keeps them: reading, choosing, writing numbers.

A figure is `{"p50": …, "p99": …, "n": …}`, as report.py makes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]
"""One result: bench, arm, settings and figures by name."""

P99_FROM = 100
"""With fewer samples a p99 is no more than the worst of them."""


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file; ValueError names the line that is none."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path.name}, line {number}: not JSON: {error}") from error
        if not isinstance(line, dict) or not {"bench", "arm"} <= line.keys():
            raise ValueError(f"{path.name}, line {number}: no result of a bench")
        lines.append(line)
    return lines


def select(lines: Iterable[Line], **wanted: object) -> list[Line]:
    """The lines with these fields."""
    return [
        line
        for line in lines
        if all(name in line and line[name] == value for name, value in wanted.items())
    ]


def values(lines: Iterable[Line], name: str) -> list[Any]:
    """The different values of a field, in order of appearance."""
    return list(dict.fromkeys(line[name] for line in lines if name in line))


def ordered(lines: Iterable[Line], name: str) -> list[Any]:
    """The different values of a field, ascending."""
    return sorted(values(lines, name))


def last(lines: Sequence[Line], **wanted: object) -> Line | None:
    """Of the lines with these fields the last: a later run of a case replaces an earlier one."""
    found = select(lines, **wanted)
    return found[-1] if found else None


def is_figure(value: object) -> bool:
    return isinstance(value, dict) and {"p50", "p99", "n"} <= value.keys()


def p50(line: Line | None, name: str) -> float | None:
    """A figure's median; None where line or figure is missing."""
    if line is None or not is_figure(line.get(name)):
        return None
    return float(line[name]["p50"])


def number(value: float) -> str:
    """Three digits, and no more of a large number than its whole part."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):g}"


def figure_text(line: Line | None, name: str) -> str:
    """A cell of a table: the median and, of enough samples, the bad tail; empty where missing."""
    if line is None or name not in line:
        return ""
    value = line[name]
    if not is_figure(value):
        return number(value) if isinstance(value, int | float) else str(value)
    median = number(value["p50"])
    return f"{median} ({number(value['p99'])})" if value["n"] >= P99_FROM else median


def samples_text(lines: Iterable[Line], *names: str) -> str:
    """How many samples the figures of these names have: `n 100`, or `n 3 to 100`."""
    figures = (line[name] for line in lines for name in names if is_figure(line.get(name)))
    counts = sorted({int(figure["n"]) for figure in figures})
    if not counts:
        return ""
    few = str(counts[0]) if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return f"n {few}"


def size_text(num_bytes: int) -> str:
    """In the largest unit of which it is a whole number."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table; the first column is text, the others are numbers."""
    yield "| " + " | ".join(header) + " |"
    yield "|---|" + "---:|" * (len(header) - 1)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def columns_table(
    first: str, rows: Sequence[tuple[str, Line | None]], columns: Mapping[str, str]
) -> Iterator[str]:
    """A table of lines; a column that no line has is left out, a row without a line too."""
    there = [(title, line) for title, line in rows if line is not None]
    names = [name for name in columns if any(name in line for _, line in there)]
    cells = [[title, *(figure_text(line, name) for name in names)] for title, line in there]
    yield from markdown([first, *(columns[name] for name in names)], cells)
