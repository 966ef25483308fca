"""The numbers of a picture."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vllm_llmdd_connector.trace.merge import Request


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """One request; None for what the files do not tell."""

    transfer: str
    request: str
    flow: str
    num_tokens: int
    num_bytes: int
    layer_bytes: list[int]
    """By layer, in the order of the caches; over all ranks."""
    exposed_ms: float | None
    """From P's last computed layer to D's report that everything is there."""
    overlap_share: float | None
    """Of the bytes: those that D had before P's last layer was computed."""
    copy_ms: float | None
    """From the first byte's start to the last one's arrival."""
    reserve_to_decode_ms: float | None
    """From D's reservation, or the begin of its pull, to its first decode step."""
    clock_error_ms: float
    failure: str


def summarize(request: Request) -> RequestSummary:
    """The numbers of one request."""
    last_ns = request.last_computed_ns
    by_layer: dict[Any, int] = dict.fromkeys(request.layer_names, 0)
    early_bytes = 0
    for copy in request.copies:
        for layer in copy.layers:
            by_layer[layer] = by_layer.get(layer, 0) + copy.layer_bytes
        if last_ns is not None and copy.end_ns <= last_ns:
            early_bytes += copy.layer_bytes * len(copy.layers)
    num_bytes = sum(by_layer.values())
    begin_ns = min((copy.begin_ns for copy in request.copies), default=None)
    end_ns = max((copy.end_ns for copy in request.copies), default=None)
    moments = request.moments
    exposed_ms = _ms(last_ns, moments.get("arrival"))
    return RequestSummary(
        transfer=request.transfer,
        request=request.request,
        flow=request.flow,
        num_tokens=request.num_tokens,
        num_bytes=num_bytes,
        layer_bytes=[by_layer[layer] for layer in sorted(by_layer)],
        # D may want less than P computes last, and have it before.
        exposed_ms=None if exposed_ms is None else max(0.0, exposed_ms),
        overlap_share=early_bytes / num_bytes if num_bytes and last_ns is not None else None,
        copy_ms=_ms(begin_ns, end_ns),
        reserve_to_decode_ms=_ms(moments.get("reserve", begin_ns), moments.get("decode")),
        clock_error_ms=round(request.clock_error_s * 1000, 6),
        failure=request.failure,
    )


@dataclass(frozen=True, slots=True)
class FlowSummary:
    """All requests of one flow; medians of those for which the value is known."""

    flow: str
    num_requests: int
    num_failed: int
    num_bytes: int
    exposed_ms: float | None
    overlap_share: float | None
    """Of all bytes of the flow."""
    copy_ms: float | None
    reserve_to_decode_ms: float | None


def by_flow(summaries: Sequence[RequestSummary]) -> list[FlowSummary]:
    """Totals of each flow."""
    flows: dict[str, list[RequestSummary]] = defaultdict(list)
    for summary in summaries:
        flows[summary.flow].append(summary)
    return [_flow_summary(flow, flows[flow]) for flow in sorted(flows)]


def _flow_summary(flow: str, parts: list[RequestSummary]) -> FlowSummary:
    known = [part for part in parts if part.overlap_share is not None]
    known_bytes = sum(part.num_bytes for part in known)
    early = sum(part.num_bytes * (part.overlap_share or 0.0) for part in known)
    return FlowSummary(
        flow=flow,
        num_requests=len(parts),
        num_failed=sum(bool(part.failure) for part in parts),
        num_bytes=sum(part.num_bytes for part in parts),
        exposed_ms=_median([part.exposed_ms for part in parts]),
        overlap_share=early / known_bytes if known_bytes else None,
        copy_ms=_median([part.copy_ms for part in parts]),
        reserve_to_decode_ms=_median([part.reserve_to_decode_ms for part in parts]),
    )


def as_json(summaries: Sequence[RequestSummary], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "requests": [asdict(summary) for summary in summaries],
        "flows": [asdict(flow) for flow in by_flow(summaries)],
        "notes": list(notes),
    }


def as_text(summaries: Sequence[RequestSummary]) -> str:
    """A table of the requests, and one of the flows."""
    header = ["request", "flow", "tokens", "MB", "layers", "kB/layer", "exposed ms", "overlap"]
    header += ["copy ms", "reserve to decode ms"]
    rows = [
        [
            _short(summary.request),
            summary.flow + (" FAILED" if summary.failure else ""),
            str(summary.num_tokens or "-"),
            f"{summary.num_bytes / 1e6:.2f}",
            str(len(summary.layer_bytes)),
            _range(summary.layer_bytes),
            number(summary.exposed_ms),
            percent(summary.overlap_share),
            number(summary.copy_ms),
            number(summary.reserve_to_decode_ms),
        ]
        for summary in summaries
    ]
    for flow in by_flow(summaries):
        rows.append(
            [
                f"{flow.num_requests} requests",
                flow.flow,
                "",
                f"{flow.num_bytes / 1e6:.2f}",
                "",
                "",
                number(flow.exposed_ms),
                percent(flow.overlap_share),
                number(flow.copy_ms),
                number(flow.reserve_to_decode_ms),
            ]
        )
    lines = _table(header, rows)
    lines.insert(1 + len(summaries), "-" * len(lines[0]))
    lines.append("The last lines: totals of bytes, the overlap of all bytes, medians of times.")
    error_ms = max(summary.clock_error_ms for summary in summaries)
    if error_ms:
        lines.append(f"Times between the two sides are right to {error_ms:.3f} ms.")
    for summary in summaries:
        if summary.failure:
            lines.append(f"{summary.request} failed: {summary.failure}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ms(begin_ns: int | None, end_ns: int | None) -> float | None:
    if begin_ns is None or end_ns is None:
        return None
    return (end_ns - begin_ns) / 1e6


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _range(layer_bytes: list[int]) -> str:
    if not layer_bytes:
        return "-"
    least, most = (f"{value / 1e3:.1f}" for value in (min(layer_bytes), max(layer_bytes)))
    return least if least == most else f"{least}-{most}"


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:14]}…{name[-9:]}"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 2 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
