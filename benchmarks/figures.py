"""Draw a results file, and write the generated part of docs/performance.md from it.

    python benchmarks/figures.py benchmarks/results/DATE.jsonl --docs
    python benchmarks/figures.py build/bench/DATE.jsonl

With --docs the figures go to docs/figures and the page is rewritten between its markers, which name
the results file; a test compares the two. Without it the figures go to a folder beside the results
and the tables to standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from record_lines import Line, read_lines
from record_plots import FIGURES, chosen, draw, titles
from record_tables import NO_RESULTS, filled_in, generated

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "performance.md"
FIGURE_FOLDER = ROOT / "docs" / "figures"
RESULTS = ROOT / "benchmarks" / "results"


def page_of(page: str, name: str) -> str:
    """The page as its results file, a path below the project's root, makes it."""
    lines = [] if name == NO_RESULTS else read_lines(ROOT / name)
    return filled_in(page, name, lines, titles(lines))


def draw_all(lines: Sequence[Line], folder: Path) -> list[Path]:
    """Draw what there is, and remove the figures of earlier results that there is not."""
    figures = chosen(lines)
    for name in FIGURES.keys() - figures.keys():
        (folder / f"{name}.png").unlink(missing_ok=True)
    paths = []
    for name, panels in figures.items():
        paths.append(folder / f"{name}.png")
        draw(panels, paths[-1])
    return paths


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, metavar="RESULTS.jsonl")
    parser.add_argument("--docs", action="store_true", help="rewrite docs/performance.md")
    options = parser.parse_args(arguments)
    results = options.results.resolve()
    if options.docs and results.parent != RESULTS:
        parser.error(f"--docs: {results} is not in {RESULTS}, where the page's results are kept")
    lines = read_lines(results)
    folder = FIGURE_FOLDER if options.docs else results.with_suffix("")
    for path in draw_all(lines, folder):
        print(path, file=sys.stderr)
    if options.docs:
        PAGE.write_text(page_of(PAGE.read_text(), str(results.relative_to(ROOT))))
    else:
        print("\n".join(generated(lines, titles(lines))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
