"""Blocks between two processes of one host: this engine, NIXL, and memcpy over the same lists.

    python benchmarks/bench_transfer.py [--iterations N] [--arms shm,cma,nixl,memcpy] …

Each arm has processes of its own: an initiator, which is timed, and a target. "read" is a pull of
the initiator (`pull_blocks`, NIXL READ), "write" a push (`push_blocks`, NIXL WRITE). memcpy copies
inside one process, as the bound. `shm` and `cma` are this engine's transports; `shm-threads` is
`shm` with the engine's own number of copy threads, all other arms copy with one. Arms take turns
within one run, one batch each; meanwhile the processes of the others are stopped (SIGSTOP), because
NIXL's progress threads spin when idle. Memory is private and touched before; batches walk through
the whole working set in random order, so caches do not help. The first batch of each case is
compared.

Results are JSON lines on stdout; a ratio as `shm/nixl` is that of the two rates, batch by batch.
The arm nixl-transport is this engine over NIXL; both of NIXL's arms use what UCX picks between the
processes of one host, and with --tcp what they would use between two: TCP, here by way of loopback.
Those lines are of the bench `transfer-tcp`.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from report import Report, rate_quantiles
from worker_process import Process, serve

BENCH = "transfer"
MIB = 1 << 20
TCP_BENCH = "transfer-tcp"
ARMS = ("memcpy", "shm", "shm-threads", "cma", "nixl", "nixl-transport")
TCP_ARMS = ("nixl", "nixl-transport")
RATIOS = (
    ("shm", "memcpy"),
    ("shm-threads", "shm"),
    ("shm", "nixl"),
    ("cma", "nixl"),
    ("nixl-transport", "nixl"),
)
OPS = ("read", "write")
PATTERNS = ("scattered", "contiguous")
TARGET_ID, INITIATOR_ID = 2, 1

# Source bytes repeat after this many; no multiple of a block, so that neighbouring blocks differ.
PERIOD = 1_000_003


@dataclass(frozen=True)
class Settings:
    iterations: int
    working_set_mib: int
    batch_mib: int
    block_bytes: tuple[int, ...]

    def num_blocks(self, block_bytes: int) -> int:
        return self.working_set_mib * MIB // block_bytes


class Memory:
    """Private anonymous pages, all touched."""

    def __init__(self, size: int, *, filled: bool) -> None:
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        tile = source_tile() if filled else bytes(PERIOD)
        for start in range(0, size, PERIOD):
            self._map[start : start + PERIOD] = tile[: min(PERIOD, size - start)]

    def block(self, index: int, block_bytes: int) -> bytes:
        return self._map[index * block_bytes : (index + 1) * block_bytes]


def source_tile() -> bytes:
    return random.Random(20).randbytes(PERIOD)


def block_lists(
    settings: Settings, block_bytes: int, pattern: str, batch: int
) -> tuple[list[int], list[int]]:
    """Source and destination blocks of one batch; the batches of a round use every block once."""
    num_blocks = settings.num_blocks(block_bytes)
    count = min(num_blocks, settings.batch_mib * MIB // block_bytes)
    rounds, place = divmod(batch, num_blocks // count)
    first = place * count
    if pattern == "contiguous":
        block_range = list(range(first, first + count))
        return block_range, block_range
    dice = random.Random(rounds)
    src, dst = (dice.sample(range(num_blocks), num_blocks) for _ in range(2))
    return src[first : first + count], dst[first : first + count]


class Side(Protocol):
    """One process of an arm: `offer` tells the other process what it needs, `connect` takes the
    other's offer, and the initiator's `run` returns when the destination blocks are filled."""

    def offer(self) -> Any: ...
    def connect(self, offer: Any) -> None: ...
    def run(self, op: str, block_bytes: int, src: list[int], dst: list[int]) -> None: ...


class MemcpySide:
    def __init__(self, settings: Settings, initiator: bool, memory: Memory) -> None:
        from vllm_llmdd_connector.datadist._engine import testing

        self._copy = testing.copy_blocks
        self._source = Memory(memory.size, filled=True)
        self._destination = memory

    def offer(self) -> None: ...

    def connect(self, offer: Any) -> None: ...

    def run(self, op: str, block_bytes: int, src: list[int], dst: list[int]) -> None:
        self._copy(self._source.addr, self._destination.addr, block_bytes, src, dst)


class EngineSide:
    """One blocks cache per block size, all over the same memory."""

    transport: str
    host = "127.0.0.1"
    threads = 1  # 0: the engine's own number

    def __init__(self, settings: Settings, initiator: bool, memory: Memory) -> None:
        from vllm_llmdd_connector import datadist
        from vllm_llmdd_connector.datadist._engine import testing

        self._api = datadist
        testing.set_copy_width(self.threads)
        config = datadist.LLMConfig()
        config.transport = self.transport
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.sync_kv_timeout = 60_000
        config.listen_ip_info = f"{self.host}:0"
        own_id = INITIATOR_ID if initiator else TARGET_ID
        self._datadist = datadist.LLMDataDist(datadist.LLMRole.MIX, own_id)
        self._datadist.init(config.generate_options())
        self._models = {size: model for model, size in enumerate(settings.block_bytes)}
        self._caches = {}
        for size, model in self._models.items():
            shape = [settings.num_blocks(size), size]
            self._caches[size] = self._datadist.cache_manager.register_blocks_cache(
                datadist.CacheDesc(1, shape, datadist.DataType.DT_INT8),
                [memory.addr],
                datadist.BlocksCacheKey(own_id, model),
            )

    def offer(self) -> tuple[str, int]:
        return self.host, self._datadist.listen_port

    def connect(self, offer: Any) -> None:
        host, port = offer
        info = self._api.LLMClusterInfo()
        info.remote_cluster_id = TARGET_ID
        info.append_local_ip_info(self.host, 1)
        info.append_remote_ip_info(host, port)
        status, _ = self._datadist.link_clusters([info], 20_000)
        if status != self._api.LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(self._datadist.last_link_error(TARGET_ID))

    def run(self, op: str, block_bytes: int, src: list[int], dst: list[int]) -> None:
        manager = self._datadist.cache_manager
        key = self._api.BlocksCacheKey(TARGET_ID, self._models[block_bytes])
        move = manager.pull_blocks if op == "read" else manager.push_blocks
        move(key, self._caches[block_bytes], src, dst, tensor_num_per_layer=1)


class CmaSide(EngineSide):
    transport = "cma"


class ShmSide(EngineSide):
    transport = "shm"


class ShmThreadsSide(ShmSide):
    threads = 0


class NixlTransportSide(EngineSide):
    """Over a TCP link, whose bytes move through NIXL."""

    transport = "nixl"


class NixlSide:
    """Descriptors are prepared once per block size; a transfer picks them by index."""

    def __init__(self, settings: Settings, initiator: bool, memory: Memory) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self._settings, self._memory = settings, memory
        self._agent = nixl_agent(f"bench-{initiator}", nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(memory.addr, memory.size, 0, "")], "DRAM")
        self._handles: dict[int, tuple[Any, Any]] = {}

    def offer(self) -> tuple[bytes, int]:
        return self._agent.get_agent_metadata(), self._memory.addr

    def _prepare(self, agent: str, addr: int, size: int) -> Any:
        blocks = [(addr + i * size, size, 0) for i in range(self._settings.num_blocks(size))]
        return self._agent.prep_xfer_dlist(agent, blocks, "DRAM")

    def connect(self, offer: Any) -> None:
        metadata, remote_addr = offer
        remote = self._agent.add_remote_agent(metadata)
        for size in self._settings.block_bytes:
            local = self._prepare("NIXL_INIT_AGENT", self._memory.addr, size)
            self._handles[size] = local, self._prepare(remote, remote_addr, size)

    def run(self, op: str, block_bytes: int, src: list[int], dst: list[int]) -> None:
        local, remote = self._handles[block_bytes]
        here, there = (dst, src) if op == "read" else (src, dst)
        handle = self._agent.make_prepped_xfer(op.upper(), local, here, remote, there)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended in state {state}")


SIDES: dict[str, Callable[[Settings, bool, Memory], Side]] = {
    "memcpy": MemcpySide,
    "shm": ShmSide,
    "shm-threads": ShmThreadsSide,
    "cma": CmaSide,
    "nixl": NixlSide,
    "nixl-transport": NixlTransportSide,
}


class Worker:
    """What a process of an arm offers to the coordinator."""

    def __init__(self, arm: str, op: str, initiator: bool, settings: Settings) -> None:
        self._op, self._settings = op, settings
        # memcpy has no target: its own memory is the destination.
        gives = arm != "memcpy" and initiator == (op == "write")
        self._memory = Memory(settings.working_set_mib * MIB, filled=gives)
        self._side = SIDES[arm](settings, initiator, self._memory)
        self.offer, self.connect = self._side.offer, self._side.connect

    def run(self, block_bytes: int, pattern: str, batch: int) -> float:
        """Seconds for one batch."""
        src, dst = block_lists(self._settings, block_bytes, pattern, batch)
        begin = time.perf_counter()
        self._side.run(self._op, block_bytes, src, dst)
        return time.perf_counter() - begin

    def check(self, block_bytes: int, pattern: str, batch: int) -> None:
        """Compare what has arrived in this process."""
        tile = source_tile() * (2 + block_bytes // PERIOD)
        for src, dst in zip(*block_lists(self._settings, block_bytes, pattern, batch), strict=True):
            start = src * block_bytes % PERIOD
            if self._memory.block(dst, block_bytes) != tile[start : start + block_bytes]:
                raise RuntimeError(f"block {dst} does not hold the bytes of block {src}")


_COMMAND = (sys.executable, str(Path(__file__).resolve()))


class Arm:
    """The processes of one arm for one operation; stopped except while measured."""

    def __init__(self, name: str, op: str, settings: Settings) -> None:
        self.name = name
        self._initiator = Process(_COMMAND, name, op, True, settings)
        self._processes = [self._initiator]
        if name != "memcpy":
            target = Process(_COMMAND, name, op, False, settings)
            self._processes.append(target)
            self._initiator.call("connect", target.call("offer"))
        taker_is_target = op == "write" and name != "memcpy"
        self._taker = self._processes[1] if taker_is_target else self._initiator
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.signal(number)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        yield
        self._signal(signal.SIGSTOP)

    def run(self, block_bytes: int, pattern: str, batch: int) -> float:
        with self._awake():
            return float(self._initiator.call("run", block_bytes, pattern, batch))

    def check(self, block_bytes: int, pattern: str, batch: int) -> None:
        with self._awake():
            self._taker.call("check", block_bytes, pattern, batch)

    def close(self) -> None:
        for process in self._processes:
            process.close()


def measure(
    arms: list[Arm], settings: Settings, block_bytes: int, pattern: str
) -> dict[str, list[float]]:
    """GB/s of each batch by arm. Batch 0 is a warm-up and is compared."""
    moved = min(settings.working_set_mib, settings.batch_mib) * MIB // block_bytes * block_bytes
    rates: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for batch in range(settings.iterations + 1):
        # A different arm begins each time, so that no arm always follows the same one.
        turn = batch % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            seconds = arm.run(block_bytes, pattern, batch)
            if batch == 0:
                arm.check(block_bytes, pattern, batch)
            else:
                rates[arm.name].append(moved / seconds / 1e9)
    return rates


def report_case(
    report: Report, bench: str, rates: dict[str, list[float]], case: dict[str, Any]
) -> list[object]:
    """Emit the lines of one case; returns its row of the table."""
    row: list[object] = [f"{case['op']} {case['block_bytes']} {case['pattern']}"]
    for arm, samples in rates.items():
        figure = rate_quantiles(samples)
        report.line(bench, arm, **case, gb_per_s=figure)
        row.append(figure["p50"])
    for ours, theirs in ratios_of(rates):
        pairs = zip(rates[ours], rates[theirs], strict=True)
        figure = rate_quantiles([upper / lower for upper, lower in pairs])
        report.line(bench, f"{ours}/{theirs}", **case, ratio=figure)
        row.append(figure["p50"])
    return row


def ratios_of(names: Iterable[str]) -> list[tuple[str, str]]:
    return [pair for pair in RATIOS if set(pair) <= set(names)]


def parse(report: Report, arguments: list[str]) -> tuple[str, list[str], Settings]:
    """The bench's name, arms and settings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arms", default=",".join(ARMS), help="comma-separated, in this order")
    parser.add_argument("--iterations", type=int, default=60, help="batches per arm and case")
    parser.add_argument("--working-set-mib", type=int, default=512)
    parser.add_argument("--batch-mib", type=int, default=64, help="moved by one call")
    parser.add_argument("--block-bytes", default=f"{16 << 10},{96 << 10}")
    parser.add_argument("--tcp", action="store_true", help="NIXL's arms alone, with UCX_TLS=tcp")
    options = parser.parse_args(arguments)
    if options.tcp:
        os.environ["UCX_TLS"] = "tcp"
    arms = list(TCP_ARMS) if options.tcp else options.arms.split(",")
    if unknown := set(arms) - set(ARMS):
        parser.error(f"unknown arms: {', '.join(sorted(unknown))}")
    if "nixl" in arms and importlib.util.find_spec("nixl") is None:
        report.progress("arm nixl is left out: nixl is not installed (extra `nixl`)")
        arms.remove("nixl")
    sizes = tuple(int(size) for size in options.block_bytes.split(","))
    bench = TCP_BENCH if options.tcp else BENCH
    return (
        bench,
        arms,
        Settings(options.iterations, options.working_set_mib, options.batch_mib, sizes),
    )


def main(arguments: list[str]) -> None:
    report = Report()
    bench, names, settings = parse(report, arguments)
    rows = []
    for op in OPS:
        with ExitStack() as stack:
            arms = []
            for name in names:
                report.progress(f"{op}: starting {name}")
                arms.append(Arm(name, op, settings))
                stack.callback(arms[-1].close)
            for block_bytes in settings.block_bytes:
                for pattern in PATTERNS:
                    own = {"op": op, "block_bytes": block_bytes, "pattern": pattern}
                    case = {**asdict(settings), "threads": 1, **own}
                    rates = measure(arms, settings, block_bytes, pattern)
                    rows.append(report_case(report, bench, rates, case))
                    report.progress(f"{rows[-1][0]}: done")
    ratios = ["/".join(pair) for pair in ratios_of(names)]
    report.progress(f"\nGB/s (p50 of {settings.iterations} batches of {settings.batch_mib} MiB)")
    report.table(["case", *names, *ratios], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(Connection(int(sys.argv[2])), Worker)
    else:
        main(sys.argv[1:])
