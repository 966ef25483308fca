"""Puts the files of any number of P's and D's together, request by request, on one clock.

A request is one of D's; its times are those of the P that computed it. Which P that is, the
transfer id says, and for a push the reservation.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_llmdd_connector.trace.clock import ClockOffset
from vllm_llmdd_connector.trace.reader import Event, TraceError, TraceFile

Layer = tuple[int, int]
"""Cache and region."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward of one P rank that computed a part of the prompt."""

    rank: str
    begin_ns: int
    end_ns: int
    is_last: bool
    computed: dict[Layer, int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of some layers on their way: one layer of a push, or a cache of a pull."""

    rank: str
    layers: tuple[Layer, ...]
    layer_bytes: int
    begin_ns: int
    end_ns: int


@dataclass(slots=True)
class Request:
    """One of D's requests; nanoseconds of P's clock, None for what no file tells."""

    transfer: str
    request: str
    flow: str
    """``push`` or ``pull``."""
    num_tokens: int = 0
    steps: list[Step] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    layer_names: dict[Layer, str] = field(default_factory=dict)
    moments: dict[str, int] = field(default_factory=dict)
    """Of D's events by name; the first one, of ``arrival`` the last rank's."""
    failure: str = ""
    clock_error_s: float = 0.0

    @property
    def last_computed_ns(self) -> int | None:
        """When P had the last layer of the prompt's last step."""
        times = [t for step in self.steps if step.is_last for t in step.computed.values()]
        return max(times, default=None)


class _Clocks:
    """How to bring times of D's clocks to P's."""

    def __init__(self, files: Sequence[TraceFile]) -> None:
        self._clock_of = {f.facts["instance"]: f.clock for f in files if "instance" in f.facts}
        self._offsets: dict[tuple[str, str], ClockOffset] = {}
        for file in files:
            for event in file.events:
                if event.name == "clock":
                    self._learn(file, event.args)

    def _learn(self, file: TraceFile, args: dict[str, Any]) -> None:
        clock = self._clock_of.get(args["instance"])
        if clock is None:
            return
        offset = ClockOffset(args["offset_s"], args["error_s"])
        known = self._offsets.get((file.clock, clock))
        if known is None or offset.error_s < known.error_s:
            self._offsets[file.clock, clock] = offset

    def offset(self, file: TraceFile, clock: str) -> ClockOffset:
        if file.clock == clock:
            return ClockOffset(0.0, 0.0)
        offset = self._offsets.get((file.clock, clock))
        if offset is None:
            raise TraceError(
                f"{file.path}: nothing tells how far its clock is from that of the prefill server; "
                "give the files of both schedulers too"
            )
        return offset


_Computed = dict[tuple[Path, int], dict[str, int]]
"""Times by file and step, then layer name."""
_Located = tuple[TraceFile, Event]


def merge(files: Sequence[TraceFile]) -> list[Request]:
    """All requests that both sides know, in the order in which D got them.

    Raises:
        TraceError: there is none, or a clock is unknown.
    """
    try:
        return _merge(files)
    except (KeyError, TypeError, IndexError) as error:
        raise TraceError(f"the files have an event that does not fit: {error!r}") from None


def _merge(files: Sequence[TraceFile]) -> list[Request]:
    at_p: dict[str, list[_Located]] = defaultdict(list)
    at_d: dict[tuple[str, str], list[_Located]] = defaultdict(list)
    computed: _Computed = defaultdict(dict)
    for file in files:
        for event in file.events:
            if event.name == "step":
                for transfer in {chunk["transfer"] for chunk in event.args["chunks"]}:
                    at_p[transfer].append((file, event))
            elif event.name == "computed":
                computed[file.path, event.args["step"]][event.args["layer"]] = event.at_ns
            elif event.name in ("queued", "sent", "done", "prompt", "prefilled"):
                at_p[event.args["transfer"]].append((file, event))
            elif "transfer" in event.args:
                at_d[event.args["transfer"], event.args["request"]].append((file, event))
    clocks = _Clocks(files)
    common = [(key, events) for key, events in at_d.items() if key[0] in at_p]
    if not common:
        raise TraceError(_nothing_common(len(at_p), len(at_d)))
    requests = [_request(*key, at_p[key[0]], events, computed, clocks) for key, events in common]
    return sorted(requests, key=lambda request: min(request.moments.values(), default=0))


def _nothing_common(num_p: int, num_d: int) -> str:
    if not num_p or not num_d:
        side = "decode" if num_p else "prefill"
        return f"no file has requests of a {side} server; give the files of both sides"
    return (
        f"no request is in files of both sides ({num_p} at prefill servers, {num_d} at decode "
        "servers); are they of the same run?"
    )


def _request(
    transfer: str,
    request_id: str,
    at_p: list[_Located],
    at_d: list[_Located],
    computed: _Computed,
    clocks: _Clocks,
) -> Request:
    reservations = {e.args["reservation"] for _, e in at_d if e.name == "reserve"}
    request = Request(transfer, request_id, "push" if reservations else "pull")
    done = [e for _, e in at_p if e.name == "done" and e.args["reservation"] in reservations]
    valid = {e.args["reservation"] for e in done} or reservations
    steps = [(f, e, c) for f, e in at_p if e.name == "step" for c in _chunks(e, transfer)]
    production = max((c["production"] for _, _, c in steps), default=0)
    if done:
        production = done[-1].args["production"]
    for file, event, chunk in steps:
        if chunk["production"] == production:
            request.num_tokens = chunk["num_tokens"]
            request.layer_names.update(_layer_names(file))
            times = computed.get((file.path, event.args["step"]), {})
            is_last = chunk["end_token"] >= chunk["num_tokens"]
            request.steps.append(_step(file, event, is_last, times))
    for file, event in at_p:
        if event.name == "sent" and event.args["reservation"] in valid:
            layers = ((event.args["cache"], event.args["layer"]),)
            request.copies.append(_copy(file, event, layers, 0))
    clock = at_p[0][0].clock
    for file, event in at_d:
        offset = clocks.offset(file, clock)
        request.clock_error_s = max(request.clock_error_s, offset.error_s)
        _add_moment(request, file, event, round(offset.offset_s * 1e9))
    return request


def _chunks(event: Event, transfer: str) -> Iterable[dict[str, Any]]:
    return (chunk for chunk in event.args["chunks"] if chunk["transfer"] == transfer)


def _add_moment(request: Request, file: TraceFile, event: Event, offset_ns: int) -> None:
    at_ns = event.at_ns + offset_ns
    if event.name == "pull":
        request.layer_names.update(_layer_names(file))
        cache = event.args["cache"]
        layers = tuple(layer for layer in _layer_names(file) if layer[0] == cache)
        request.copies.append(_copy(file, event, layers, offset_ns))
    elif event.name == "failed":
        request.failure = f"{event.args['stage']}: {event.args['reason']}"
    known = request.moments.get(event.name, at_ns)
    choose = max if event.name == "arrival" else min
    request.moments[event.name] = choose(known, at_ns)


def _copy(file: TraceFile, event: Event, layers: tuple[Layer, ...], offset_ns: int) -> Copy:
    assert event.end_ns is not None
    return Copy(
        file.process,
        layers,
        event.args["layer_bytes"],
        event.at_ns + offset_ns,
        event.end_ns + offset_ns,
    )


def _layer_names(file: TraceFile) -> dict[Layer, str]:
    return {
        (cache["cache"], index): region[0]
        for cache in file.facts["caches"]
        for index, region in enumerate(cache["regions"])
    }


def _step(file: TraceFile, event: Event, is_last: bool, times: dict[str, int]) -> Step:
    """A region is computed with the last of its layers; one that no hook reported, with the
    step."""
    assert event.end_ns is not None
    computed = {
        (cache["cache"], index): max(times.get(layer, event.end_ns) for layer in region[1:])
        for cache in file.facts["caches"]
        for index, region in enumerate(cache["regions"])
    }
    return Step(file.process, event.at_ns, event.end_ns, is_last, computed)
