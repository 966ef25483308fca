"""What the connector's traces say of a run of the demo: the flows side by side."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vllm_llmdd_connector.trace.__main__ import read_all
from vllm_llmdd_connector.trace.merge import merge
from vllm_llmdd_connector.trace.reader import TraceError
from vllm_llmdd_connector.trace.summary import by_flow, number, percent, summarize


def show_traces(folder: Path, console: Console) -> None:
    """Print the summary of the servers' traces and how to draw them.

    Traces are no part of the verdict: what is wrong with them is said and ends nothing.
    """
    try:
        flows = by_flow([summarize(request) for request in merge(read_all([folder]))])
    except TraceError as error:
        console.print(f"no picture of the transfers: {error}", style="yellow", markup=False)
        return
    table = Table(title="What the transfers cost (medians over the prompts)")
    table.add_column("")
    for flow in flows:
        table.add_column(flow.flow, justify="right")
    rows = {
        "prompts": [str(flow.num_requests) for flow in flows],
        "moved, all prompts": [f"{flow.num_bytes / 1e6:.1f} MB" for flow in flows],
        "exposed: P's last layer computed, to D has it": [
            f"{number(flow.exposed_ms)} ms" for flow in flows
        ],
        "overlap: bytes at D before P's last layer": [
            percent(flow.overlap_share) for flow in flows
        ],
        "first byte sent to last byte there": [f"{number(flow.copy_ms)} ms" for flow in flows],
        "reserved (or pull begun) to first decode step": [
            f"{number(flow.reserve_to_decode_ms)} ms" for flow in flows
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    command = f"python -m vllm_llmdd_connector.trace {folder} --summary --png timeline.png"
    console.print(f"each request, and the timeline: {command}", style="dim", markup=False)
