"""What a worker of a vLLM server does while nothing is asked, thread by thread.

The threads that a connector starts have no names that the kernel knows: they cannot be told from
vLLM's own. Every one of them is among the threads besides the main one, so those together are an
upper bound; the main thread runs vLLM's loop. Times are the scheduler's nanoseconds, since a tick
of 10 ms is more than most threads use.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from server_requests import shifted

if TYPE_CHECKING:
    from server_arms import Arm

_SETTLE_S = 0.5
"""After SIGCONT a server first does what it has missed."""
_FIRST_SETTLE_S = 2.5
"""vLLM's queues spin for a second after the last step."""


@dataclass(frozen=True)
class Idle:
    """Percent of a processor, in one window."""

    servers: float
    """All processes of the arm's vLLM servers."""
    main: float
    """The main thread of a worker, and its others together; of P and D whichever has more."""
    others: float


def idle_windows(arms: Sequence[Arm], windows: int, seconds: float) -> dict[str, list[Idle]]:
    """Windows by arm; the arms take turns."""
    found: dict[str, list[Idle]] = {arm.name: [] for arm in arms}
    for turn in range(windows):
        for arm in shifted(arms, turn):
            with arm.turn():
                time.sleep(_SETTLE_S if turn else _FIRST_SETTLE_S)
                found[arm.name].append(_window(arm, seconds))
    return found


def _window(arm: Arm, seconds: float) -> Idle:
    workers = [worker_of(server.pids()) for server in arm.vllm_servers()]
    begin, used_s = time.monotonic_ns(), arm.cpu_s()
    before = [thread_times(pid) for pid in workers]
    time.sleep(seconds)
    passed = time.monotonic_ns() - begin
    servers = 100e9 * (arm.cpu_s() - used_s) / passed
    after = [thread_times(pid) for pid in workers]
    shares = [
        split(pid, old, new, passed) for pid, old, new in zip(workers, before, after, strict=True)
    ]
    return Idle(servers, max(main for main, _ in shares), max(others for _, others in shares))


def worker_of(pids: Sequence[int], proc: Path = Path("/proc")) -> int:
    """The process that has the worker: one of its own, or the engine's core."""
    titles = {pid: (proc / str(pid) / "cmdline").read_text().replace("\0", " ") for pid in pids}
    for name in ("VLLM::Worker", "VLLM::EngineCore"):
        for pid, title in titles.items():
            if title.startswith(name):
                return pid
    raise RuntimeError(f"none of the server's processes has a worker: {titles}")


def thread_times(pid: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """Nanoseconds on a processor so far, by thread."""
    times = {}
    for task in (proc / str(pid) / "task").iterdir():
        try:
            times[int(task.name)] = int((task / "schedstat").read_text().split()[0])
        except OSError:  # it has ended since
            continue
    return times


def split(
    pid: int, before: dict[int, int], after: dict[int, int], passed_ns: int
) -> tuple[float, float]:
    """Percent of the main thread, and of the others together; a new thread counts in whole."""
    used = {thread: at - before.get(thread, 0) for thread, at in after.items()}
    main = used.pop(pid, 0)
    return 100 * main / passed_ns, 100 * sum(used.values()) / passed_ns
