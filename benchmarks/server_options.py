"""Command lines of the benches of real servers: what they have in common."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "models" / "SmolLM2-135M-Instruct"


class ServerOptions(argparse.ArgumentParser):
    """`--arms`, `--model` and `--quick`; a bench adds its own.

    `description` is the bench's docstring, of which the first line is shown; `quick` has the
    defaults of its options under `--quick`.
    """

    def __init__(
        self, description: str | None, arms: Sequence[str], quick: Mapping[str, Any]
    ) -> None:
        super().__init__(description=(description or "").partition("\n")[0])
        self._known, self._quick = arms, quick
        self.add(
            "--arms", type=self._arms, default=",".join(arms), help="comma-separated; default: all"
        )
        self.add("--model", type=Path, default=MODEL, help="default: %(default)s")
        self.add("--quick", action="store_true", help="one of each; the figures mean nothing")

    def add(self, name: str, **settings: Any) -> None:
        self.add_argument(name, **settings)

    def add_lengths(self, default: str) -> None:
        text = "prompt lengths, and how often each; default: %(default)s"
        self.add(
            "--lengths", type=parse_lengths, default=default, metavar="TOKENS:TURNS,…", help=text
        )

    def read(self) -> argparse.Namespace:
        if self.parse_args().quick:
            self.set_defaults(**self._quick)
        return self.parse_args()

    def _arms(self, text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(self._known)):
            raise argparse.ArgumentTypeError(
                f"unknown: {', '.join(unknown)}; there are {', '.join(self._known)}"
            )
        return names


def parse_lengths(text: str) -> dict[int, int]:
    """`512:9,2048:9` as the number of turns by prompt length; argparse shows the error."""
    lengths = {}
    for word in text.split(","):
        tokens, _, turns = word.partition(":")
        if not (tokens.isdecimal() and turns.isdecimal() and int(tokens) and int(turns)):
            raise argparse.ArgumentTypeError(f"{word!r} is not TOKENS:TURNS, as 512:9")
        lengths[int(tokens)] = int(turns)
    return lengths
