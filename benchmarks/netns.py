"""Two network namespaces with a link of a given rate between them, and a way to reach both.

    with shaped_link(1000) as (prefill, decode):
        subprocess.run([*prefill.wrapper, "vllm", "serve", …])

`veth` joins the two, shaped at both ends by the kernel's token bucket (`tc … tbf`); KV cache goes
there. `http` joins each of them to this process's own namespace and is not shaped: prompts and
answers go there, so that the counters of `veth` see transfers alone. UCX would take both, so it is
told which one. Needs root, iproute2's `ip` and `tc`, and a kernel with veth and tbf.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

_BURST_BYTES = 256 << 10
"""Of the token bucket: some of TCP's largest segments, which it would have to split otherwise."""
_QUEUE_MS = 20
_UP_S = 10.0
TRANSFER_NETWORK = "10.211.7.0/24"


class UnavailableError(Exception):
    """This machine cannot make such a link; the text says why in a sentence."""


@dataclass(frozen=True)
class Side:
    """One end of the link: a namespace, and its addresses."""

    namespace: str
    transfer_host: str
    """On the shaped link."""
    http_host: str
    """Where this process reaches what runs there."""
    environment: Mapping[str, str] = field(
        default_factory=lambda: {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "veth"}
    )
    """For what runs there: UCX takes TCP and the shaped link alone."""

    @property
    def wrapper(self) -> tuple[str, ...]:
        """A command that runs the rest of its arguments in the namespace, in its own process."""
        return ("ip", "netns", "exec", self.namespace)

    def received_bytes(self) -> int:
        """What has come in on the shaped link so far, headers included."""
        counter = "/sys/class/net/veth/statistics/rx_bytes"
        return int(_run(*self.wrapper, "cat", counter))


def check_available() -> None:
    """Raises UnavailableError."""
    if os.geteuid() != 0:
        raise UnavailableError("network namespaces need root; run this as root")
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise UnavailableError(f"iproute2's {' and '.join(missing)} is missing; install iproute2")


@contextmanager
def shaped_link(mbit_per_s: int) -> Iterator[tuple[Side, Side]]:
    """P's end and D's; both are removed on exit, and with them everything between them.

    Raises:
        UnavailableError: root, a program, or something of the kernel is missing.
    """
    check_available()
    own = os.getpid()
    sides = [
        Side(f"llmdd-bench-{own}-{n}", f"10.211.7.{n}", f"10.211.8.{4 * n + 1}") for n in (1, 2)
    ]
    with ExitStack() as stack:
        try:
            for side in sides:
                _run("ip", "netns", "add", side.namespace)
                stack.callback(_remove, side.namespace)
            _join(sides[0], sides[1])
            for number, side in enumerate(sides):
                _connect(side, f"lb{number}-{own}", f"10.211.8.{4 * (number + 1) + 2}")
                _shape(side, mbit_per_s)
            for side in sides:
                _wait_up(side)
        except subprocess.CalledProcessError as error:
            words = " ".join(error.cmd)
            raise UnavailableError(f"`{words}` failed: {error.stderr.strip()}") from error
        yield sides[0], sides[1]


def _join(first: Side, second: Side) -> None:
    _run(
        *("ip", "link", "add", "veth", "netns", first.namespace, "type", "veth"),
        *("peer", "name", "veth", "netns", second.namespace),
    )
    for side in (first, second):
        inside = ("ip", "-n", side.namespace)
        _run(*inside, "addr", "add", f"{side.transfer_host}/24", "dev", "veth")
        _run(*inside, "link", "set", "veth", "up")
        _run(*inside, "link", "set", "lo", "up")


def _connect(side: Side, device: str, own_host: str) -> None:
    """The way from this process's namespace; it goes with the other end."""
    _run(
        *("ip", "link", "add", device, "type", "veth"),
        *("peer", "name", "http", "netns", side.namespace),
    )
    _run("ip", "addr", "add", f"{own_host}/30", "dev", device)
    _run("ip", "link", "set", device, "up")
    _run("ip", "-n", side.namespace, "addr", "add", f"{side.http_host}/30", "dev", "http")
    _run("ip", "-n", side.namespace, "link", "set", "http", "up")


def _shape(side: Side, mbit_per_s: int) -> None:
    _run(
        *("tc", "-n", side.namespace, "qdisc", "add", "dev", "veth", "root", "tbf"),
        *("rate", f"{mbit_per_s}mbit", "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms"),
    )


def _wait_up(side: Side) -> None:
    """The kernel says so up to a second later, and UCX takes no device before."""
    deadline = time.monotonic() + _UP_S
    while (state := _run(*side.wrapper, "cat", "/sys/class/net/veth/operstate").strip()) != "up":
        if time.monotonic() > deadline:
            raise UnavailableError(f"the link between the namespaces is {state} after {_UP_S:g} s")
        time.sleep(0.05)


def _remove(namespace: str) -> None:
    """Processes that still run inside would keep it and its links."""
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
