"""The figures of docs/performance.md: what each shows is chosen here from the lines, then drawn.

A figure is a row of panels and is there when its lines are. Choosing is pure; only `draw` needs
matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from record_lines import Line, last, ordered, p50, select, size_text, values
from record_tables import main_working_set

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]

COLOURS = {
    "memcpy": "0.45",
    "aggregated": "0.45",
    "nixl": "tab:red",
    "nixl-push": "tab:orange",
    "whole KV at the link's rate": "0.45",
    "nixl-transport": "tab:brown",
    "cma": "tab:blue",
    "shm": "tab:green",
    "shm-threads": "tab:olive",
    "pull": "tab:blue",
    "push": "tab:green",
}
"""An arm looks the same everywhere; others take matplotlib's next colour."""


@dataclass(frozen=True)
class Panel:
    title: str
    x: str
    y: str
    series: Mapping[str, Points]
    log_y: bool = False
    x_is_size: bool = False
    """In bytes; otherwise it counts."""

    def ticks(self) -> dict[float, str]:
        """Where x has points, and what is written there."""
        xs = sorted({x for points in self.series.values() for x, _ in points})
        return {x: size_text(int(x)) if self.x_is_size else f"{x:,.0f}" for x in xs}


Chooser = Callable[[Sequence[Line]], list[Panel]]


def transfer(lines: Sequence[Line]) -> list[Panel]:
    rates = [line for line in select(lines, bench="transfer") if "gb_per_s" in line]
    if not rates:
        return []
    rates = select(rates, working_set_mib=main_working_set(rates))
    return _filled(
        Panel(
            f"{op}, {pattern}",
            "size of a block",
            "GB/s",
            _by_arm(select(rates, op=op, pattern=pattern), "block_bytes", "gb_per_s"),
            x_is_size=True,
        )
        for op in values(rates, "op")
        for pattern in values(rates, "pattern")
    )


def exposed(lines: Sequence[Line]) -> list[Panel]:
    """Where both ways to compute were tried, the one that keeps its processor: as real ones do."""
    found = select(lines, bench="layer_overlap")
    held = select(found, compute="hold") or found
    return _filled(
        Panel(
            f"link of {rate:g} GB/s",
            "tokens of the prompt",
            "ms from P's last layer to D's report",
            _by_arm(select(held, rate_gb_per_s=rate), "tokens", "exposed_ms"),
            log_y=True,
        )
        for rate in ordered(held, "rate_gb_per_s")
    )


def ttft(lines: Sequence[Line]) -> list[Panel]:
    asked = select(lines, bench="servers", question="request")
    series = _by_arm(asked, "tokens", "ttft_ms")
    return _filled([Panel("", "tokens of the prompt", "ms to the first token", series, log_y=True)])


def network(lines: Sequence[Line]) -> list[Panel]:
    asked = select(lines, bench="network", question="request")
    waits = _by_arm(asked, "tokens", "ttft_ms")
    added = _by_arm(asked, "tokens", "last_layer_to_decode_ms")
    bound = {(line["tokens"], line["link_ms"]) for line in asked}
    added["whole KV at the link's rate"] = sorted(bound)
    return _filled(
        [
            Panel("", "tokens of the prompt", "ms to the first token", waits, log_y=True),
            Panel("", "tokens of the prompt", "ms from P's last layer to D's step", added, True),
        ]
    )


def steps(lines: Sequence[Line]) -> list[Panel]:
    idle = select(lines, bench="steps", arm="idle")
    series = _by("role", idle, "running", "step_us")
    return _filled([Panel("", "running requests", "µs in all hooks of a step", series)])


def links(lines: Sequence[Line]) -> list[Panel]:
    found = select(lines, bench="growth", arm="links")
    times = {
        "one more link": _points(found, "links", "link_us"),
        "pull of 4 KiB": _points(found, "links", "pull_us"),
    }
    memory = {"memory": [(line["links"], line["rss_kib_per_link"]) for line in found]}
    return _filled(
        [
            Panel("", "links", "µs", times, log_y=True),
            Panel("", "links", "KiB per link", memory),
        ]
    )


FIGURES: Mapping[str, tuple[str, Chooser]] = {
    "transfer": ("GB/s by size of block", transfer),
    "exposed": ("Exposed time by length of prompt", exposed),
    "ttft": ("Time to first token by length of prompt", ttft),
    "network": ("First token, and what the transfer adds, over a network", network),
    "steps": ("Hooks of a step by running requests", steps),
    "links": ("Times and memory by number of links", links),
}
"""By file name: what it is called, and what it shows."""


def chosen(lines: Sequence[Line]) -> dict[str, list[Panel]]:
    """The figures that these lines have something for."""
    found = {name: choose(lines) for name, (_, choose) in FIGURES.items()}
    return {name: panels for name, panels in found.items() if panels}


def titles(lines: Sequence[Line]) -> dict[str, str]:
    """What the figures of these lines are called."""
    return {name: FIGURES[name][0] for name in chosen(lines)}


def draw(panels: Sequence[Panel], path: Path) -> None:
    """One PNG, the panels side by side, at most two in a row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5.2 * columns, 3.6 * rows), squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels, strict=False):
        _fill(axis, panel)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_axis_off()
    _explain(figure, list(axes.flat)[: len(panels)])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _fill(axis: Axes, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for name, points in panel.series.items():
        xs, ys = zip(*points, strict=True)
        axis.plot(xs, ys, marker="o", markersize=4, label=name, color=COLOURS.get(name))
    axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    axis.set_xscale("log", base=2)
    ticks = panel.ticks()
    axis.set_xticks(list(ticks), list(ticks.values()), rotation=30 if len(ticks) > 5 else 0)
    axis.xaxis.set_minor_formatter(NullFormatter())
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _explain(figure: Figure, axes: Sequence[Axes]) -> None:
    """One legend below panels of the same series, where it hides no line; else one in each."""
    handles, labels = axes[0].get_legend_handles_labels()
    if all(axis.get_legend_handles_labels()[1] == labels for axis in axes):
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        return
    for axis in axes:
        axis.legend()


def _filled(panels: Iterable[Panel]) -> list[Panel]:
    """The panels that have points, with the series that have."""
    kept = []
    for panel in panels:
        series = {name: points for name, points in panel.series.items() if points}
        if series:
            kept.append(replace(panel, series=series))
    return kept


def _by_arm(lines: Sequence[Line], x: str, figure: str) -> dict[str, Points]:
    return _by("arm", lines, x, figure)


def _by(field: str, lines: Sequence[Line], x: str, figure: str) -> dict[str, Points]:
    return {
        str(value): _points(select(lines, **{field: value}), x, figure)
        for value in values(lines, field)
    }


def _points(lines: Sequence[Line], x: str, figure: str) -> Points:
    medians = ((at, p50(last(lines, **{x: at}), figure)) for at in ordered(lines, x))
    return [(float(at), median) for at, median in medians if median is not None]
