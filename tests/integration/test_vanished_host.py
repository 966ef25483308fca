"""A machine that goes away closes no connection: two network namespaces, and a link taken down."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fakes.clock import PATIENCE_S, wait_for
from fakes.netns import NEEDS_NAMESPACES, Namespace, joined_namespaces

pytestmark = NEEDS_NAMESPACES

KEEPALIVE_S = 1
"""So that a loss is noticed after 4 s; by default it takes four times as long as a test waits."""


class Side:
    """A ``control_side`` in a namespace."""

    def __init__(self, namespace: Namespace, what: str, host: str, *rest: object) -> None:
        path = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
        arguments = (what, host, KEEPALIVE_S, *rest)
        self._process = subprocess.Popen(
            [*namespace.inside, sys.executable, "-m", "fakes.control_side", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        )

    def line(self) -> str:
        """The next one that it says."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE_S)
        assert ready, "the other process says nothing"
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    with joined_namespaces() as sides:
        yield sides


@pytest.fixture
def start() -> Iterator[Callable[..., Side]]:
    sides: list[Side] = []

    def started(*arguments: object) -> Side:
        sides.append(Side(*arguments))  # type: ignore[arg-type]
        return sides[-1]

    yield started
    for side in sides:
        side.close()


@pytest.mark.parametrize("talks", [False, True])
def test_either_side_notices_that_the_other_host_is_gone(
    namespaces: tuple[Namespace, Namespace], start: Callable[..., Side], talks: bool
) -> None:
    """Keepalive probes only what has nothing under way: a D that went on renewing its claims, so
    that its kernel sent the same bytes again and again, would have taken a quarter of an hour."""
    p, d = namespaces
    server = start(p, "serve", p.ip)
    port = server.line()
    dialer = start(d, "dial", p.ip, port, talks)
    assert dialer.line() == "linked"
    assert (p.num_connections(), d.num_connections()) == (1, 1)
    p.take_down()
    assert dialer.line() == f"the control connection to {p.ip}:{port} was refused or lost"
    wait_for(lambda: p.num_connections() == 0, "P's end of the connection")
    assert d.num_connections() == 0
