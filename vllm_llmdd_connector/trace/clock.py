"""Clocks: which files share one, and how far P's is from D's when they do not."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """P's monotonic clock minus D's."""

    offset_s: float
    error_s: float
    """Half of the round trip: the truth lies within the offset plus or minus this."""


def estimate(sent_s: float, peer_s: float, received_s: float) -> ClockOffset:
    """From one round trip: ours at both ends, the peer's somewhere between.

    The two ways may take differently long, so that the middle is only the best guess.
    """
    half_s = (received_s - sent_s) / 2
    return ClockOffset(peer_s - (sent_s + half_s), half_s)


def clock_domain() -> str:
    """A name that all processes with this monotonic clock share: the kernel's start and, where
    there are any, the time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"process {os.getpid()}"
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        namespace = ""
    return f"{boot} {namespace}".strip()
