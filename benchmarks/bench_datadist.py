"""The calls of the LLM-DataDist API, one at a time, between two processes of one host.

    python benchmarks/bench_datadist.py [--seconds S] [--block-bytes N] [--ops pull_cache,…]

Both engines are in remote-access mode. This process calls and is timed; a helper process is the
peer: source of the pulls, destination of the pushes, which it copies by itself before it answers.
A transfer is one `transfer_cache_async` over all layers whose layers are marked beforehand, from
the call to the return of `synchronize`; its time is also given per layer.

Results are JSON lines on stdout, in microseconds; `calls_per_s` is the mean of the whole run.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from report import Report, quantiles

from vllm_llmdd_connector import datadist

BENCH = "datadist"
OPS = ("pull_cache", "pull_blocks", "push_blocks", "transfer")
BLOCK_COUNTS = (1, 64, 1024)
CALLER_ID, PEER_ID = 1, 2
ROW_BYTES = 4096
WARM_UP_CALLS = 20


@dataclass(frozen=True)
class Settings:
    seconds: float
    layers: int
    block_bytes: int


class Side:
    """One engine with a cache of one 4 KiB row and a blocks cache of all layers."""

    def __init__(self, cluster_id: int, settings: Settings) -> None:
        config = datadist.LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.sync_kv_timeout = 60_000
        config.listen_ip_info = "127.0.0.1:0"
        self.datadist = datadist.LLMDataDist(datadist.LLMRole.MIX, cluster_id)
        self.datadist.init(config.generate_options())
        self.manager = self.datadist.cache_manager
        self._memory: list[mmap.mmap] = []
        self.row = self.manager.register_cache(*self._tensors(1, 1, ROW_BYTES))
        self.blocks = self.manager.register_blocks_cache(
            *self._tensors(2 * settings.layers, max(BLOCK_COUNTS), settings.block_bytes),
            datadist.BlocksCacheKey(cluster_id),
        )

    def _tensors(
        self, count: int, rows: int, row_bytes: int
    ) -> tuple[datadist.CacheDesc, list[int]]:
        addrs = []
        for _ in range(count):
            memory = mmap.mmap(-1, rows * row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory[:] = b"\x5a" * len(memory)  # touched
            addrs.append(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
            self._memory.append(memory)
        return datadist.CacheDesc(count, [rows, row_bytes], datadist.DataType.DT_INT8), addrs

    def link(self, port: int) -> None:
        info = datadist.LLMClusterInfo()
        info.remote_cluster_id = PEER_ID
        info.append_local_ip_info("127.0.0.1", 1)
        info.append_remote_ip_info("127.0.0.1", port)
        status, _ = self.datadist.link_clusters([info], 20_000)
        if status != datadist.LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(self.datadist.last_link_error(PEER_ID))


def serve(pipe: Connection) -> None:
    side = Side(PEER_ID, pipe.recv())
    pipe.send((side.datadist.listen_port, side.row.cache_id))
    pipe.recv()  # the end
    side.datadist.finalize()


@contextmanager
def peer(settings: Settings) -> Iterator[tuple[int, int]]:
    """A helper process; gives its port and the id of its row cache."""
    ours, theirs = Pipe()
    command = [sys.executable, str(Path(__file__)), "--worker", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.send(settings)
        yield ours.recv()
        ours.send(None)
        process.wait()


def scattered(count: int) -> tuple[list[int], list[int]]:
    """Pairs of blocks of which no two make one run."""
    total = max(BLOCK_COUNTS)
    return (
        [block * 5 % total for block in range(count)],
        [block * 7 % total for block in range(count)],
    )


def make_calls(
    side: Side, row_id: int, settings: Settings, ops: list[str]
) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """The cases: operation, number of blocks (0: one row), and the call to time."""
    key = datadist.BlocksCacheKey(PEER_ID)
    manager = side.manager
    if "pull_cache" in ops:
        row_key = datadist.CacheKeyByIdAndIndex(PEER_ID, row_id)
        yield "pull_cache", 0, lambda: manager.pull_cache(row_key, side.row)
    one_layer: dict[str, Any] = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    for count in BLOCK_COUNTS:
        src, dst = scattered(count)
        if "pull_blocks" in ops:
            yield (
                "pull_blocks",
                count,
                lambda src=src, dst=dst: manager.pull_blocks(
                    key, side.blocks, src, dst, **one_layer
                ),
            )
        if "push_blocks" in ops:
            yield (
                "push_blocks",
                count,
                lambda src=src, dst=dst: manager.push_blocks(
                    key, side.blocks, src, dst, **one_layer
                ),
            )
    synchronizer = datadist.NativeLayerSynchronizer(settings.layers)
    synchronizer.mark_all()
    every = range(settings.layers)

    def transfer(src: list[int], dst: list[int]) -> None:
        config = datadist.TransferWithCacheKeyConfig(key, every, every)
        task = manager.transfer_cache_async(side.blocks, synchronizer, [config], src, dst)
        if task.synchronize() != datadist.LLMStatusCode.LLM_SUCCESS:
            raise SystemExit(f"a transfer failed: {task.get_results()}")

    if "transfer" in ops:
        for count in BLOCK_COUNTS:
            src, dst = scattered(count)
            yield "transfer", count, lambda src=src, dst=dst: transfer(src, dst)


def sample(call: Callable[[], None], seconds: float) -> list[float]:
    """Microseconds of each call."""
    for _ in range(WARM_UP_CALLS):
        call()
    samples = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1000)
    return samples


def report_case(
    report: Report, settings: Settings, op: str, count: int, samples: list[float]
) -> list[object]:
    """Emit the line of one case; returns its row of the table."""
    fields: dict[str, Any] = {**asdict(settings), "blocks": count, "us": quantiles(samples)}
    fields["calls_per_s"] = round(1e6 * len(samples) / sum(samples), 1)
    per_layer: object = ""
    if op == "transfer":
        fields["us_per_layer"] = quantiles([us / settings.layers for us in samples])
        per_layer = fields["us_per_layer"]["p50"]
    report.line(BENCH, op, **fields)
    figure = fields["us"]
    name = f"{op} {count}" if count else op
    return [name, fields["calls_per_s"], figure["p50"], figure["p99"], per_layer]


def parse(arguments: list[str]) -> tuple[list[str], Settings]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--block-bytes", type=int, default=4096)
    options = parser.parse_args(arguments)
    ops = options.ops.split(",")
    if unknown := set(ops) - set(OPS):
        parser.error(f"unknown operations: {', '.join(sorted(unknown))}")
    return ops, Settings(options.seconds, options.layers, options.block_bytes)


def main(arguments: list[str]) -> None:
    report = Report()
    ops, settings = parse(arguments)
    rows = []
    side = Side(CALLER_ID, settings)
    with peer(settings) as (port, row_id):
        side.link(port)
        for op, count, call in make_calls(side, row_id, settings, ops):
            rows.append(report_case(report, settings, op, count, sample(call, settings.seconds)))
            report.progress(f"{rows[-1][0]}: done")
        side.datadist.finalize()
    report.progress("")
    report.table(["case", "calls/s", "p50 us", "p99 us", "us/layer"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(Connection(int(sys.argv[2])))
    else:
        main(sys.argv[1:])
