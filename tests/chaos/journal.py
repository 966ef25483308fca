"""What happened in a simulated world, line by line: the same lines for the same seed."""

from __future__ import annotations

import hashlib
import traceback
from collections import deque
from pathlib import Path

MAX_LINES = 400_000
"""The last ones are kept; the digest is of all."""


class Journal:
    """Lines with virtual times."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_lines = 0

    def note(self, now_s: float, text: str) -> None:
        line = f"{now_s:12.6f} {text}"
        self._lines.append(line)
        self._digest.update(line.encode())
        self.num_lines += 1

    def exception(self, now_s: float, who: str) -> str:
        """Note the exception being handled; returns it as one text."""
        text = f"{who}: {traceback.format_exc().strip()}"
        self.note(now_s, text)
        return text

    @property
    def digest(self) -> str:
        """Of every line so far."""
        return self._digest.hexdigest()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(self._lines) + "\n")
