"""What option `integrity` costs: hashing alone, and pull and push with it off, sampled and full.

    python benchmarks/bench_integrity.py [--blocks 512] [--layers 30] [--block-bytes 32768] …

Two processes, P and D, with the product's worker parts on both sides; the three settings take turns
within one run. A prompt is computed before D asks for it, so nothing hides a transfer or its
checksums: `transfer_ms` is the time from D's order to its report, and `added` the ratio to `off` of
the same round, less 1.

`gb_per_s` of the line `hash` is one thread over all blocks, with the product's code.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Literal

import zmq
from report import Report, quantiles, rate_quantiles

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    AskSums,
    Message,
    Release,
    ReleaseAck,
    WorkerEndpoint,
)
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import Job, LeasedPrompt, PrefillChunk, PullJob, ReceiveJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.backend import HostBackend
from vllm_llmdd_connector.worker.checksum import BlockReader, Place
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.engine import DataDistEngine
from vllm_llmdd_connector.worker.lease_sums import LeaseSums
from vllm_llmdd_connector.worker.peer import PeerThread
from vllm_llmdd_connector.worker.peer_link import PeerContext
from vllm_llmdd_connector.worker.push import Pusher
from vllm_llmdd_connector.worker.push_sums import PushSums
from vllm_llmdd_connector.worker.sum_thread import SumThread
from vllm_llmdd_connector.worker.verify import Verifier

BENCH = "integrity"
HOST = "127.0.0.1"
Policy = Literal["off", "sample", "full"]
POLICIES: tuple[Policy, ...] = ("off", "sample", "full")
FLOWS = ("pull", "push")
BLOCK_TOKENS = 128
P_CLUSTER, D_CLUSTER = 1, 2


@dataclass(frozen=True)
class Shape:
    blocks: int
    layers: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.layers * self.block_bytes


class Memory:
    """KV memory of one side, touched."""

    def __init__(self, shape: Shape) -> None:
        num_blocks = shape.blocks + 1  # vLLM never gives out block 0
        size = num_blocks * shape.block_bytes
        tile = random.Random(1).randbytes(1_000_003)
        self._maps: list[mmap.mmap] = []
        regions = []
        for layer in range(shape.layers):
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
            memory[:] = (tile * (size // len(tile) + 1))[:size]
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            regions.append(Region(str(layer), base, shape.block_bytes, (str(layer),)))
            self._maps.append(memory)
        self.plans = [CachePlan(0, 0, num_blocks, shape.block_bytes, tuple(regions))]


def config_of(policy: Policy) -> ConnectorConfig:
    return ConnectorConfig(sync_kv_timeout_ms=60_000, integrity=policy)


def open_engine(memory: Memory, cluster_id: int, is_producer: bool) -> DataDistEngine:
    """The one engine of a process."""
    config = config_of("off")
    return DataDistEngine(config, HostBackend(config), cluster_id, memory.plans, is_producer)


class PrefillArm:
    """P with one setting."""

    def __init__(self, memory: Memory, engine: DataDistEngine, policy: Policy) -> None:
        self._thread = SumThread(BlockReader(memory.plans))
        sums = None
        self._leases: LeaseSums | None = None
        if policy != "off":
            sums = PushSums(memory.plans, policy, self._thread)
            self._leases = LeaseSums(memory.plans, policy, self._thread, P_CLUSTER)
        self._pusher = Pusher(
            engine, memory.plans, [BLOCK_TOKENS], time.monotonic, TransferStats(), sums=sums
        )
        self._server = Server("worker", HOST, 0, lambda: None)
        self._server.start(self._on_message)

    @property
    def port(self) -> int:
        return self._server.port

    def hold(self, flow: str, number: int, num_blocks: int) -> None:
        """Everything of a prompt is computed."""
        blocks = tuple(range(1, num_blocks + 1))
        if flow == "push":
            tokens = num_blocks * BLOCK_TOKENS
            chunk = PrefillChunk(f"t{number}", number, tokens, (blocks,), tokens, (num_blocks,))
            self._pusher.begin_step([chunk])
            self._pusher.end_step()
        elif self._leases is not None:
            self._leases.update([LeasedPrompt(number, "s", (blocks,), (num_blocks,))], [])

    def let_go(self, number: int) -> None:
        self._pusher.void([number])
        if self._leases is not None:
            self._leases.update([], [number])

    def close(self) -> None:
        self._server.close()
        self._pusher.close()
        self._thread.close()

    def _on_message(self, message: AnyMessage, reply: Callable[[Message], None]) -> None:
        if isinstance(message, AskSums):
            assert self._leases is not None
            self._leases.handle(message, reply)
        else:
            self._pusher.handle(message, reply)


def confirm(message: AnyMessage, reply: Callable[[Message], None]) -> None:
    """P's scheduler: every block is held."""
    if isinstance(message, Release):
        reply(ReleaseAck(claim_id=message.claim_id, production=message.production, valid=True))


def serve(pipe: Connection) -> None:
    """P: hold what the pipe asks for."""
    shape = Shape(**pipe.recv())
    memory = Memory(shape)
    engine = open_engine(memory, P_CLUSTER, is_producer=True)
    arms = [PrefillArm(memory, engine, policy) for policy in POLICIES]
    scheduler = Server("scheduler", HOST, 0, lambda: None)
    scheduler.start(confirm)
    pipe.send((scheduler.port, engine.listen_port, [arm.port for arm in arms]))
    with suppress(EOFError):
        while True:
            index, flow, number = pipe.recv()
            arms[index].hold(flow, number, shape.blocks)
            pipe.send(None)
            pipe.recv()  # D has reported it
            arms[index].let_go(number)
    for arm in arms:
        arm.close()
    scheduler.close()
    engine.close()


@contextmanager
def peer(shape: Shape) -> Iterator[tuple[Connection, int, int, list[int]]]:
    """P in a process of its own; the pipe to it, and the ports of its scheduler, its engine and its
    arms."""
    ours, theirs = Pipe()
    command = [sys.executable, str(Path(__file__)), "--worker", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        # As a dict: this module has another name in the other process.
        ours.send(asdict(shape))
        try:
            yield ours, *ours.recv()
        finally:
            ours.close()  # the end, wherever P is
            process.wait()


class SharedLink:
    """D's engine for the threads of all arms: linked once, until the end."""

    def __init__(self, engine: DataDistEngine) -> None:
        self._engine = engine
        self._is_linked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def link(self, endpoint: WorkerEndpoint) -> None:
        if not self._is_linked:
            self._is_linked = True
            self._engine.link(endpoint)

    def unlink(self, endpoint: WorkerEndpoint) -> None: ...


class DecodeArm:
    """D with one setting."""

    def __init__(
        self,
        memory: Memory,
        engine: Any,
        policy: Policy,
        address: tuple[str, int],
        endpoint: WorkerEndpoint,
    ) -> None:
        self._address, self._endpoint = address, endpoint
        self._completions, stats = Completions(), TransferStats()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        verifier = None
        if policy != "off":
            is_cancelled = self._completions.is_cancelled
            reader = BlockReader(memory.plans)
            verifier = Verifier(memory.plans, policy, reader, stats, is_cancelled)
        context = PeerContext(
            config=config_of(policy),
            engine=engine,
            plans=memory.plans,
            completions=self._completions,
            stats=stats,
            digests=None,
            zmq_context=self._zmq,
            tp_rank=0,
            verifier=verifier,
        )
        self._peer = PeerThread(context, self._endpoint, self._address, on_end=lambda peer: None)
        self._peer.start()

    def run(self, flow: str, number: int, num_blocks: int) -> float:
        """Milliseconds from the order to the report."""
        job = self._job(flow, number, list(range(1, num_blocks + 1)))
        self._completions.expect(job.request_id, [])
        begin = time.monotonic()
        self._peer.submit(job)
        while (drained := self._completions.drain()) is None:
            time.sleep(0.0002)
        if drained.failed:
            raise SystemExit(f"a transfer failed: {drained.failed}")
        return (time.monotonic() - begin) * 1000

    def close(self) -> None:
        self._peer.close()
        self._zmq.term()

    def _job(self, flow: str, number: int, blocks: list[int]) -> Job:
        common = {
            "request_id": f"r{number}",
            "transfer_id": f"t{number}",
            "claim_id": number,
            "control_address": self._address,
            "session": 1,
            "workers": (self._endpoint,),
            "loaded_blocks": [],
            "timeout_s": 600.0,
        }
        if flow == "push":
            return ReceiveJob(groups=[WantedBlocks(blocks, 0)], **common)  # type: ignore[arg-type]
        group = GroupBlocks(blocks, blocks, 0)
        return PullJob(production=number, secret="s", groups=[group], **common)  # type: ignore[arg-type]


def hash_rate(memory: Memory, shape: Shape) -> float:
    """GB/s of one thread over all blocks."""
    reader, sums = BlockReader(memory.plans), dict[Place, int]()
    blocks = {(0, position): 1 + position for position in range(shape.blocks)}
    begin = time.monotonic()
    for region in range(shape.layers):
        reader.add(memory.plans[0], region, blocks, sums, lambda: False)
    return shape.num_bytes / (time.monotonic() - begin) / 1e9


def measure(
    shape: Shape, repeats: int, report: Report
) -> tuple[list[float], dict[tuple[str, Policy], list[float]]]:
    """Hash rates, and milliseconds by flow and setting; round 0 makes links and is left out."""
    memory = Memory(shape)
    times: dict[tuple[str, Policy], list[float]] = {}
    numbers = iter(range(1, 1_000_000))
    with peer(shape) as (pipe, scheduler_port, engine_port, ports):
        engine = open_engine(memory, D_CLUSTER, is_producer=False)
        shared, address = SharedLink(engine), (HOST, scheduler_port)
        endpoints = [
            WorkerEndpoint(
                cluster_id=P_CLUSTER, host=HOST, engine_port=engine_port, control_port=port
            )
            for port in ports
        ]
        arms = [
            DecodeArm(memory, shared, policy, address, endpoint)
            for policy, endpoint in zip(POLICIES, endpoints, strict=True)
        ]
        for turn in range(repeats + 1):
            for flow in FLOWS:
                for step in range(len(POLICIES)):
                    index = (turn + step) % len(POLICIES)  # none always follows the same one
                    number = next(numbers)
                    pipe.send((index, flow, number))
                    pipe.recv()
                    took_ms = arms[index].run(flow, number, shape.blocks)
                    pipe.send(None)
                    if turn:
                        times.setdefault((flow, POLICIES[index]), []).append(took_ms)
            report.progress(f"round {turn} of {repeats}: done")
        for arm in arms:
            arm.close()
        engine.close()
    return [hash_rate(memory, shape) for _ in range(max(3, repeats // 2))], times


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--block-bytes", type=int, default=32 << 10, help="of one layer")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args(arguments)
    report = Report()
    shape = Shape(options.blocks, options.layers, options.block_bytes)
    rates, times = measure(shape, options.repeats, report)
    report.line(BENCH, "hash", **asdict(shape), threads=1, gb_per_s=rate_quantiles(rates))
    rows = [["hash, GB/s", rate_quantiles(rates)["p50"], "", ""]]
    for flow in FLOWS:
        row: list[object] = [flow]
        for policy in POLICIES:
            pairs = zip(times[flow, policy], times[flow, "off"], strict=True)
            added = quantiles([ours / off - 1 for ours, off in pairs])
            taken = quantiles(times[flow, policy])
            report.line(BENCH, policy, **asdict(shape), flow=flow, transfer_ms=taken, added=added)
            row.append(f"{taken['p50']} ms" if policy == "off" else f"{100 * added['p50']:+.0f} %")
        rows.append(row)
    report.progress("")
    report.table(["", *POLICIES], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(Connection(int(sys.argv[2])))
    else:
        main(sys.argv[1:])
