"""The generated part of docs/performance.md, from the lines of one results file.

A section is there when its lines are; a column when one of its cells is. What was not run is left
out. All text is made from the lines alone, so that a test can compare.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from record_lines import (
    P99_FROM,
    Line,
    columns_table,
    figure_text,
    last,
    markdown,
    number,
    ordered,
    samples_text,
    select,
    size_text,
    values,
)
from record_server_tables import contacts, idle, loads, network, requests

Figures = Mapping[str, str]
"""Which figure of a section is drawn, by its name, and what it is called."""

Section = Callable[[Sequence[Line]], Iterator[str]]

BEGIN, END = "<!-- results: {} -->", "<!-- end of results -->"
NO_RESULTS = "none"
_GENERATED = re.compile(r"<!-- results: (\S+) -->\n.*?<!-- end of results -->", re.DOTALL)


def results_name(page: str) -> str:
    """The results file that the page was made from, or NO_RESULTS."""
    found = _GENERATED.findall(page)
    if len(found) != 1:
        raise ValueError(f"the page has {len(found)} places for results, it needs one")
    return str(found[0])


def filled_in(page: str, name: str, lines: Sequence[Line], drawn: Figures) -> str:
    """The page with the generated part made from these lines of the file of this name."""
    results_name(page)
    text = "\n".join([BEGIN.format(name), *generated(lines, drawn), END])
    return _GENERATED.sub(lambda match: text, page)


def generated(lines: Sequence[Line], drawn: Figures) -> Iterator[str]:
    """Line by line, without the markers."""
    if not lines:
        yield "\nNo results yet: `make bench` writes them here.\n"
        return
    yield ""
    yield from _origin(lines)
    for name, (title, bench, section) in SECTIONS.items():
        text = list(section(select(lines, bench=bench)))
        if not text:
            continue
        yield f"\n### {title}\n"
        if name in drawn:
            yield f"![{drawn[name]}](figures/{name}.png)\n"
        yield from text
    yield ""


def _origin(lines: Sequence[Line]) -> Iterator[str]:
    """Where the figures come from: machine, versions, revision, load."""
    machine, versions = lines[-1].get("machine", {}), lines[-1].get("versions", {})
    facts = [f"{name} {value}" for name, value in versions.items()]
    if machine:
        yield (
            f"{machine['cpu']}, {machine['cores']} processors, {machine['memory_gib']} GiB, Linux "
            f"{machine['kernel']}, Python {machine['python']}; {', '.join(facts)}; revision "
            f"{', '.join(values(lines, 'revision'))}."
        )
    runs = [line["run"] for line in lines if "run" in line]
    if runs:
        loads = [run["load"] for run in runs]
        yield (
            f"Begun {min(run['began'] for run in runs)}; load before each bench "
            f"{min(loads):g} to {max(loads):g}."
        )
    yield (
        "A cell is the median; in parentheses the 99th percentile on the bad side, where there are "
        f"at least {P99_FROM} samples."
    )


def _pivot(
    lines: Sequence[Line], rows: Sequence[tuple[str, dict[str, object]]], column: str, figure: str
) -> Iterator[str]:
    """A table with a column for each value of a field; rows without any cell are left out."""
    columns = values(lines, column)
    table = []
    for title, row in rows:
        cells = [figure_text(last(lines, **{column: name}, **row), figure) for name in columns]
        if any(cells):
            table.append([title, *cells])
    yield from markdown(["", *columns], table)


def _transfer(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    rates, ratios = ([line for line in lines if name in line] for name in ("gb_per_s", "ratio"))
    main = main_working_set(rates)
    yield f"GB/s by size of block, {main} MiB of memory ({samples_text(rates, 'gb_per_s')}):\n"
    yield from _transfer_table(select(rates, working_set_mib=main), "gb_per_s")
    if at_main := select(ratios, working_set_mib=main):
        yield "\nRatios of two arms, batch by batch; median:\n"
        yield from _transfer_table(at_main, "ratio")
    sets = ordered(rates, "working_set_mib")
    if len(sets) > 1:
        yield "\nScattered blocks by working set:\n"
        for lines_of, figure in ((rates, "gb_per_s"), (ratios, "ratio")):
            yield from _set_table(lines_of, figure, len(sets))
            yield ""


def _transfer_tcp(lines: Sequence[Line]) -> Iterator[str]:
    if lines:
        rates, ratios = ([line for line in lines if name in line] for name in ("gb_per_s", "ratio"))
        yield f"NIXL's two arms on loopback ({samples_text(rates, 'gb_per_s')}):\n"
        yield from _transfer_table(rates, "gb_per_s")
        yield "\nRatios, batch by batch; median:\n"
        yield from _transfer_table(ratios, "ratio")


def main_working_set(rates: Sequence[Line]) -> int:
    """MiB of the working set that was tried with the most sizes of block."""

    def num_sizes(mib: int) -> int:
        return len(values(select(rates, working_set_mib=mib), "block_bytes"))

    return int(max(values(rates, "working_set_mib"), key=num_sizes))


def _transfer_table(lines: Sequence[Line], figure: str) -> Iterator[str]:
    rows: list[tuple[str, dict[str, object]]] = [
        (
            f"{op}, {pattern}, {size_text(size)}",
            {"op": op, "pattern": pattern, "block_bytes": size},
        )
        for op in values(lines, "op")
        for pattern in values(lines, "pattern")
        for size in ordered(lines, "block_bytes")
    ]
    yield from _pivot(lines, rows, "arm", figure)


def _set_table(lines: Sequence[Line], figure: str, num_sets: int) -> Iterator[str]:
    """Those sizes of block that every working set was tried with."""
    scattered = select(lines, pattern="scattered")
    rows: list[tuple[str, dict[str, object]]] = []
    for op in values(scattered, "op"):
        for size in ordered(scattered, "block_bytes"):
            of_size = select(scattered, op=op, block_bytes=size)
            sets = ordered(of_size, "working_set_mib")
            if len(sets) < num_sets:
                continue
            for mib in sets:
                wanted: dict[str, object] = {"op": op, "block_bytes": size, "working_set_mib": mib}
                rows.append((f"{op}, {size_text(size)}, {mib} MiB", wanted))
    if rows:
        yield from _pivot(scattered, rows, "arm", figure)


def _overlap(lines: Sequence[Line]) -> Iterator[str]:
    rows = []
    for compute in values(lines, "compute"):
        for rate in ordered(lines, "rate_gb_per_s"):
            for tokens in ordered(lines, "tokens"):
                case = {"compute": compute, "rate_gb_per_s": rate, "tokens": tokens}
                push, pull = (last(lines, arm=arm, **case) for arm in ("push", "pull"))
                known = push or pull
                if known is None:
                    continue
                title = f"{rate:g} GB/s, {tokens:,} tokens, {compute}"
                one_layer = number(known["layer_transfer_ms"])
                cells = [figure_text(arm, "exposed_ms") for arm in (push, pull)]
                rows.append([title, one_layer, *cells, figure_text(push, "hook_us")])
    if not rows:
        return
    first = lines[0]
    yield (
        f"Milliseconds from P's last layer to D's report; {first['layers']} layers of "
        f"{first['compute_ms']:g} ms, steps of {first['chunk_tokens']:,} tokens "
        f"({samples_text(lines, 'exposed_ms')}). `hold`: the compute keeps its processor busy.\n"
    )
    header = ["link, prompt, compute", "one layer's transfer", "push", "pull", "layer hook, µs"]
    yield from markdown(header, rows)


def _steps(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    yield "Microseconds in all hooks of one engine step, both sides of the connector together:\n"
    rows = []
    for line in lines:
        running = f", {line['running']} running" if "running" in line else ""
        blocks = f", {_count(line['blocks'], 'block')}" if "blocks" in line else ""
        figure = "hook_us" if "hook_us" in line else "step_us"
        of = f"{line['arm']}{running}{blocks}, {line['role']}"
        rows.append([of, figure_text(line, figure), f"{line[figure]['n']:,}"])
    yield from markdown(["step", "µs", "n"], rows)


def _calls(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    yield f"One call between two processes, blocks of {lines[0]['block_bytes']:,} bytes:\n"
    rows = []
    for line in lines:
        of = f"{line['arm']}, {_count(line['blocks'], 'block')}" if line["blocks"] else line["arm"]
        cells = [figure_text(line, name) for name in ("us", "us_per_layer", "calls_per_s")]
        rows.append([of, *cells, f"{line['us']['n']:,}"])
    yield from markdown(["call", "µs", "µs per layer", "calls/s", "n"], rows)


def _growth(lines: Sequence[Line]) -> Iterator[str]:
    if links := select(lines, arm="links"):
        columns = {
            "link_us": "one more link, µs",
            "pull_us": "pull of 4 KiB, µs",
            "fds_per_link": "descriptors per link",
            "threads_per_link": "threads per link",
            "rss_kib_per_link": "KiB per link",
            "idle_cores": "idle processors",
        }
        rows = [(_count(line["links"], "link"), line) for line in links]
        yield from columns_table(f"({samples_text(links, 'link_us', 'pull_us')})", rows, columns)
    if leases := select(lines, arm="leases"):
        columns = {
            "claim_us": "claim, µs",
            "renew_us": "renewal, µs",
            "release_us": "release, µs",
            "take_ended_us_per_lease": "end of one, µs",
        }
        yield ""
        rows = [(_count(line["leases"], "lease"), line) for line in leases]
        yield from columns_table(f"({samples_text(leases, 'claim_us')})", rows, columns)
    if messages := select(lines, arm="messages"):
        columns = {"num_messages": "messages", "total_bytes": "bytes", "code_us": "coding, µs"}
        yield ""
        rows = [(f"{line['flow']}, {_count(line['blocks'], 'block')}", line) for line in messages]
        yield from columns_table(f"({samples_text(messages, 'code_us')})", rows, columns)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def _integrity(lines: Sequence[Line]) -> Iterator[str]:
    if not lines:
        return
    first = lines[0]
    yield (
        f"Option `integrity`: {_count(first['blocks'], 'block')}, {first['layers']} layers of "
        f"{size_text(first['block_bytes'])} a block ({samples_text(lines, 'transfer_ms')}). "
        "*Added* is the share of the same turn's transfer without it.\n"
    )
    rows = [(f"{line.get('flow', 'all')}, {line['arm']}", line) for line in lines]
    columns = {"transfer_ms": "transfer, ms", "added": "added", "gb_per_s": "GB/s, one thread"}
    yield from columns_table("flow, setting", rows, columns)


SECTIONS: Mapping[str, tuple[str, str, Section]] = {
    "transfer": ("Blocks between two processes", "transfer", _transfer),
    "tcp": ("Blocks over TCP", "transfer-tcp", _transfer_tcp),
    "exposed": ("What a request waits for", "layer_overlap", _overlap),
    "ttft": ("Real servers, one request at a time", "servers", requests),
    "network": ("Real servers over a network", "network", network),
    "load": ("Real servers under load", "servers", loads),
    "contact": ("First contact", "contact", contacts),
    "idle": ("Nothing to do", "servers", idle),
    "steps": ("Hooks of an engine step", "steps", _steps),
    "integrity": ("Checksums of blocks", "integrity", _integrity),
    "calls": ("Calls of the API", "datadist", _calls),
    "links": ("What grows", "growth", _growth),
}
"""By the name of the section's figure, where it has one: title, bench, text."""
