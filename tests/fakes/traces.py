"""Trace files of a made-up transfer, with times to the millisecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_llmdd_connector.trace.recorder import Recorder

CACHES = [{"cache": 0, "block_len": 100, "regions": [["l0", "l0"], ["l1", "l1"]]}]
MS = 1_000_000


def at(ms: float) -> int:
    """Some time after the machine's start."""
    return round((1_000_000 + ms) * MS)


def write_p(
    folder: Path,
    transfer: str = "t",
    *,
    rank: int = 0,
    production: int = 1,
    reservation: str = "a",
    is_pushed: bool = True,
    sent: tuple[tuple[int, float, float], ...] = ((0, 11, 15), (1, 21, 26)),
    **facts: Any,
) -> Path:
    """P's rank: a step from 0 to 21 ms that computes its layers by 10 and 20 ms.

    ``sent``: layer, start and arrival of 300 bytes each.
    """
    recorder = Recorder(
        str(folder), "kv_producer", "engine-p", f"rank {rank}", caches=CACHES, **facts
    )
    chunk = {"transfer": transfer, "production": production, "num_tokens": 3, "end_token": 3}
    recorder.span("step", at(0), at(21), step=1, chunks=[chunk])
    for layer, ms in (("l0", 10), ("l1", 20)):
        recorder.event("computed", at(ms), step=1, layer=layer)
    if is_pushed:
        names = {"transfer": transfer, "reservation": reservation, "production": production}
        for layer_index, begin, end in sent:
            recorder.span(
                "sent", at(begin), at(end), **names, cache=0, layer=layer_index, layer_bytes=300
            )
        recorder.event("done", at(26), **names)
    recorder.close()
    return recorder.path


def write_p_scheduler(folder: Path, instance: str = "instance", **facts: Any) -> Path:
    recorder = Recorder(
        str(folder), "kv_producer", "engine-p", "scheduler", instance=instance, **facts
    )
    recorder.event("prompt", at(-20), transfer="t", request="cmpl-p", num_tokens=3)
    recorder.close()
    return recorder.path


def write_d(
    folder: Path,
    transfer: str = "t",
    *,
    rank: int = 0,
    reservation: str = "a",
    is_pushed: bool = True,
    arrival: float = 27,
    shift_ms: float = 0.0,
    clocks: tuple[dict[str, Any], ...] = (),
    **facts: Any,
) -> Path:
    """D's rank: reserves at -5 ms (or pulls from 22 to 26 ms) and decodes at 30 ms; ``shift_ms``
    is added to all times."""
    recorder = Recorder(
        str(folder), "kv_consumer", "engine-d", f"rank {rank}", caches=CACHES, **facts
    )
    for clock in clocks:
        recorder.event("clock", **clock)
    names = {"transfer": transfer, "request": f"d-{transfer}"}
    if is_pushed:
        recorder.event("reserve", at(-5 + shift_ms), **names, reservation=reservation)
    else:
        recorder.span(
            "pull", at(22 + shift_ms), at(26 + shift_ms), **names, cache=0, layer_bytes=300
        )
    recorder.event("arrival", at(arrival + shift_ms), **names)
    recorder.event("decode", at(30 + shift_ms), **names)
    recorder.close()
    return recorder.path
