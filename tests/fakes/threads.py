"""Looks at threads of this process from outside: whether they really sleep."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def named_thread(name: str) -> threading.Thread:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    return thread


def num_switches(thread: threading.Thread) -> int:
    """How often the kernel has put the thread to sleep or back to work (Linux)."""
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return sum(
        int(line.split()[1]) for line in status.splitlines() if "voluntary_ctxt_switches" in line
    )


def falls_asleep(thread: threading.Thread, quiet_s: float = 0.2, attempts: int = 50) -> bool:
    """Whether the thread comes to rest: it does not run at all for ``quiet_s``."""
    for _ in range(attempts):
        before, cpu_s = num_switches(thread), _cpu_s(thread)
        time.sleep(quiet_s)
        if (num_switches(thread), _cpu_s(thread)) == (before, cpu_s):
            return True
    return False


def _cpu_s(thread: threading.Thread) -> float:
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
