"""A control group with a limit of memory, below that of the tests; version 1 or 2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_TOP = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Processes that join share its limit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._limit, self._usage = (
            ("memory.max", "memory.current")
            if (directory / "memory.max").exists()
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )

    @property
    def wrapper(self) -> tuple[str, ...]:
        """A command that runs the rest of its arguments here."""
        procs = self._directory / "cgroup.procs"
        return ("sh", "-c", f'echo $$ > "{procs}" && exec "$@"', "sh")

    @property
    def is_limited(self) -> bool:
        return (self._directory / self._limit).exists()

    def leave(self, num_bytes: int) -> None:
        """So much more may be taken, beyond what is taken now."""
        taken = int((self._directory / self._usage).read_text())
        (self._directory / self._limit).write_text(str(taken + num_bytes))


def _own_directory() -> Path | None:
    """Of the hierarchy that bounds memory."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path(f"{_TOP}/memory{path}")
        if not controllers and (_TOP / "cgroup.controllers").exists():
            return Path(f"{_TOP}{path}")
    return None


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Skips the test where this user cannot make one."""
    own = _own_directory()
    if own is None:
        pytest.skip("no control group bounds memory here")
    directory = own / f"llmdd-test-{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made: {error}")
    try:
        group = MemoryGroup(directory)
        if not group.is_limited:
            pytest.skip(f"no limit of memory can be set below {own}")
        yield group
    finally:
        directory.rmdir()
