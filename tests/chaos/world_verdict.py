"""What came out of one simulated world."""

from __future__ import annotations

import msgspec


class Verdict(msgspec.Struct):
    """Counts, and in words whatever must not be."""

    seed: str
    num_requests: int = 0
    """Decode legs that an engine took."""
    ends: dict[str, int] = msgspec.field(default_factory=dict)
    """Decode legs by how they ended."""
    faults: dict[str, int] = msgspec.field(default_factory=dict)
    counts: dict[str, int] = msgspec.field(default_factory=dict)
    """The connector's counters, over all engines."""
    wrong: list[str] = msgspec.field(default_factory=list)
    """Wrong outputs, and copies that must not have been."""
    hangs: list[str] = msgspec.field(default_factory=list)
    leaks: list[str] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    """Exceptions, and failures without a cause."""
    longest_s: float = 0.0
    """From a fault to the end of a request that it touched, in virtual time."""
    virtual_s: float = 0.0
    messages: dict[str, int] = msgspec.field(default_factory=dict)
    """Of the control plane, by kind."""
    digest: str = ""
    """Of the journal."""

    @property
    def problems(self) -> list[str]:
        groups = {
            "wrong": self.wrong,
            "hang": self.hangs,
            "leak": self.leaks,
            "error": self.errors,
        }
        return [f"{name}: {text}" for name, texts in groups.items() for text in texts]
