"""The timeline: for each request P's lane above D's, layers as a staircase. Needs matplotlib.

In P's lane each layer is a bar from the end of the layer before it to its own; in D's lane a bar
from the start of its push, or of the pull, to its arrival.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from vllm_llmdd_connector.trace.merge import Layer, Request
from vllm_llmdd_connector.trace.summary import number, percent, summarize

MAX_REQUESTS = 8
"""Of one picture; more could not be read."""

_STRIP = 0.1
"""Height of one of D's moments' names, as a share of the layers' height."""
_COMPUTED, _EARLY, _LATE, _EXPOSED = "#4c72b0", "#55a868", "#dd8452", "#c44e52"
_MOMENTS = {
    "admitted": "request at D",
    "allocated": "blocks allocated",
    "reserve": "reserved",
    "arrival": "D has it",
    "decode": "first decode step",
}


def draw(requests: Sequence[Request], path: Path) -> int:
    """Write the picture; returns how many requests it shows."""
    shown = requests[:MAX_REQUESTS]
    figure, axes = plt.subplots(
        2 * len(shown),
        1,
        figsize=(12, 5.4 * len(shown) + 0.6),
        squeeze=False,
        height_ratios=[1.0, 1.5] * len(shown),  # D's lane has the names of its moments, too
        layout="constrained",
    )
    try:
        for index, request in enumerate(shown):
            _draw_request(request, axes[2 * index, 0], axes[2 * index + 1, 0])
        handles = [
            Patch(color=_COMPUTED, label="P computes a layer"),
            Patch(color=_EARLY, label="layer on its way, arrived before P's last layer"),
            Patch(color=_LATE, label="layer on its way, arrived after it"),
            Patch(color=_EXPOSED, alpha=0.25, label="exposed: P has finished, D waits"),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
    return len(shown)


def _draw_request(request: Request, p_lane: Axes, d_lane: Axes) -> None:
    layers = {layer: index for index, layer in enumerate(sorted(request.layer_names))}
    begins = [step.begin_ns for step in request.steps] + [copy.begin_ns for copy in request.copies]
    zero_ns = min(begins or list(request.moments.values()))
    _draw_steps(request, p_lane, layers, zero_ns)
    _draw_copies(request, d_lane, layers, zero_ns)
    limits = _limits(request, zero_ns)
    for lane, side in ((p_lane, "P"), (d_lane, "D")):
        lane.set_xlim(*limits)
        lane.set_ylim(len(layers) - 0.4, -0.6)
        lane.set_ylabel(f"{side}: layer", fontsize=11)
        lane.set_yticks(range(0, len(layers), -(-len(layers) // 6) or 1))
        lane.grid(axis="x", color="0.9")
        lane.set_axisbelow(True)
    p_lane.tick_params(labelbottom=False)
    d_lane.set_xlabel("ms since P began to compute the prompt", fontsize=10)
    _draw_moments(request, d_lane, len(layers), zero_ns, limits)
    _draw_exposed(request, (p_lane, d_lane), zero_ns)
    summary = summarize(request)
    p_lane.set_title(
        f"{request.flow} {request.request}: {request.num_tokens} tokens, "
        f"{summary.num_bytes / 1e6:.2f} MB in {len(layers)} layers, "
        f"exposed {number(summary.exposed_ms)} ms, overlap {percent(summary.overlap_share)}",
        fontsize=11,
        loc="left",
    )


def _draw_steps(request: Request, lane: Axes, layers: dict[Layer, int], zero_ns: int) -> None:
    for step in request.steps:
        before_ns = step.begin_ns
        for layer, at_ns in sorted(step.computed.items(), key=lambda item: item[1]):
            _draw_bar(lane, layers[layer], _ms(before_ns, zero_ns), _ms(at_ns, zero_ns), _COMPUTED)
            before_ns = at_ns


def _draw_copies(request: Request, lane: Axes, layers: dict[Layer, int], zero_ns: int) -> None:
    last_ns = request.last_computed_ns
    for copy in request.copies:
        is_early = last_ns is not None and copy.end_ns <= last_ns
        begin_ms, end_ms = _ms(copy.begin_ns, zero_ns), _ms(copy.end_ns, zero_ns)
        for layer in copy.layers:
            _draw_bar(lane, layers[layer], begin_ms, end_ms, _EARLY if is_early else _LATE)


def _draw_bar(lane: Axes, row: int, begin_ms: float, end_ms: float, color: str) -> None:
    """With an edge, which is seen even where the bar is shorter than a pixel."""
    length = end_ms - begin_ms
    lane.barh(row, length, left=begin_ms, height=0.8, color=color, edgecolor=color, linewidth=0.8)


def _draw_moments(
    request: Request, lane: Axes, num_layers: int, zero_ns: int, limits: tuple[float, float]
) -> None:
    """D's moments as lines, their names in a strip of their own below the layers."""
    found = sorted(
        (_ms(request.moments[name], zero_ns), text)
        for name, text in _MOMENTS.items()
        if name in request.moments
    )
    row = max(num_layers, 1) * _STRIP
    lane.set_ylim(num_layers - 0.4 + row * (len(found) + 0.3), -0.6)
    middle = sum(limits) / 2
    for index, (at_ms, text) in enumerate(found):
        lane.axvline(at_ms, color="0.35", linewidth=0.9, linestyle=":")
        is_right = at_ms > middle
        lane.annotate(
            f"{text} {at_ms:.2f}",
            (at_ms, num_layers - 0.4 + row * (index + 0.6)),
            xytext=(-4 if is_right else 4, 0),
            textcoords="offset points",
            ha="right" if is_right else "left",
            va="center",
            fontsize=9,
            annotation_clip=True,
        )


def _draw_exposed(request: Request, lanes: Sequence[Axes], zero_ns: int) -> None:
    last_ns, arrival_ns = request.last_computed_ns, request.moments.get("arrival")
    if last_ns is None or arrival_ns is None or arrival_ns <= last_ns:
        return
    for lane in lanes:
        lane.axvspan(
            _ms(last_ns, zero_ns), _ms(arrival_ns, zero_ns), color=_EXPOSED, alpha=0.25, zorder=0
        )


def _limits(request: Request, zero_ns: int) -> tuple[float, float]:
    """From P's first work to D's first decode step, with what came shortly before."""
    ends = [step.end_ns for step in request.steps] + [copy.end_ns for copy in request.copies]
    end_ms = _ms(max([*ends, *request.moments.values()]), zero_ns)
    begin_ms = min((_ms(at_ns, zero_ns) for at_ns in request.moments.values()), default=0.0)
    begin_ms = max(-0.35 * end_ms, min(0.0, begin_ms))
    margin = 0.03 * (end_ms - begin_ms) + 0.01
    return begin_ms - margin, end_ms + margin


def _ms(at_ns: int, zero_ns: int) -> float:
    return (at_ns - zero_ns) / 1e6
