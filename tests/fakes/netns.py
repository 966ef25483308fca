"""Two network namespaces, joined by a veth pair: nothing but TCP between them.

Apart from the benchmarks' netns.py, which also shapes the link and adds a way for HTTP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_ESTABLISHED = "01"


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"llmdd-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    run("ip", "netns", "delete", name)
    return True


NEEDS_NAMESPACES = pytest.mark.skipif(
    not can_make_namespaces(), reason="network namespaces need root and iproute2's ip"
)


@dataclass(frozen=True)
class Namespace:
    name: str
    ip: str

    @property
    def inside(self) -> tuple[str, ...]:
        """A command that runs the rest of its arguments here."""
        return ("ip", "netns", "exec", self.name)

    def received_bytes(self) -> int:
        return int(run(*self.inside, "cat", "/sys/class/net/veth/statistics/rx_bytes"))

    def num_connections(self) -> int:
        """TCP connections that the kernel takes for alive."""
        rows = run(*self.inside, "cat", "/proc/net/tcp").splitlines()[1:]
        return sum(row.split()[3] == _ESTABLISHED for row in rows)

    def take_down(self) -> None:
        """Nothing comes in or goes out any more, and nobody is told."""
        run("ip", "-n", self.name, "link", "set", "veth", "down")


@contextmanager
def joined_namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    """Both, with their ends of the veth up."""
    sides = [Namespace(f"llmdd-{os.getpid()}-{n}", f"10.211.7.{n}") for n in (1, 2)]
    made: list[Namespace] = []
    try:
        for side in sides:
            run("ip", "netns", "add", side.name)
            made.append(side)
        first, second = sides
        run(
            *("ip", "link", "add", "veth", "netns", first.name, "type", "veth"),
            *("peer", "name", "veth", "netns", second.name),
        )
        for side in sides:
            command = ("ip", "-n", side.name)
            run(*command, "addr", "add", f"{side.ip}/24", "dev", "veth")
            run(*command, "link", "set", "veth", "up")
            run(*command, "link", "set", "lo", "up")
        yield first, second
    finally:
        for side in made:
            run("ip", "netns", "delete", side.name)
