"""Stamps: small files that say which inputs a finished step was made from.

A step is redone when the fingerprint of its inputs differs from its stamp. The stamp is written
last, so a step that was interrupted is redone as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def fingerprint(files: Iterable[Path], *words: str) -> str:
    """Hash the names and contents of `files` and the `words` (versions, options) beside them."""
    digest = hashlib.sha256()
    for word in words:
        digest.update(word.encode() + b"\0")
    for path in sorted(files):
        digest.update(str(path).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_current(stamp: Path, value: str) -> bool:
    return stamp.is_file() and stamp.read_text() == value


def write(stamp: Path, value: str) -> None:
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(value)
