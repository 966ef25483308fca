"""What many worlds came to: one line each, and a summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from world_verdict import Verdict


def total(verdicts: Iterable[Verdict]) -> Verdict:
    """Sums, and the longest time, over worlds."""
    summed = Verdict("all")
    for verdict in verdicts:
        for name in Verdict.__struct_fields__:
            ours, theirs = getattr(summed, name), getattr(verdict, name)
            if isinstance(ours, dict):
                for key, amount in theirs.items():
                    ours[key] = ours.get(key, 0) + amount
            elif isinstance(ours, list):
                ours.extend(theirs)
            elif name == "longest_s":
                summed.longest_s = max(ours, theirs)
            elif not isinstance(ours, str):
                setattr(summed, name, ours + theirs)
    return summed


def summary(verdict: Verdict, num_worlds: int) -> str:
    """Everything on a few lines; the last is the one to look at."""
    return "\n".join(
        [
            f"decode legs by their end: {_listed(verdict.ends)}",
            f"counters: {_listed(verdict.counts)}",
            f"messages: {_listed(verdict.messages)}",
            f"faults: {_listed(verdict.faults)}",
            f"chaos: {verdict.num_requests} requests in {num_worlds} worlds, "
            f"{verdict.virtual_s:.0f} virtual seconds, {sum(verdict.messages.values())} messages, "
            f"{sum(verdict.faults.values())} faults; "
            f"{len(verdict.wrong)} wrong outputs, {len(verdict.hangs)} hangs, "
            f"{len(verdict.leaks)} leaks, {len(verdict.errors)} errors; "
            f"longest from a fault to the end of a request that it touched "
            f"{verdict.longest_s:.1f} s",
        ]
    )


def _listed(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {amount}" for name, amount in sorted(amounts.items())) or "none"
