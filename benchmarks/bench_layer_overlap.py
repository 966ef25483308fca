"""What a transfer costs a request: layer-wise push against a pull after prefill.

    python benchmarks/bench_layer_overlap.py [--tokens 512,4096] [--rates 0.25,4] [--compute hold]

Two processes, P and D, with the product's worker parts on both sides: on P the pusher, fed by the
steps and layer hooks of a prefill that takes `compute_ms` per layer and step, on D the thread that
reserves, pulls and reports. D's copies keep to `rate_gb_per_s`, as over a link of that rate. A
prompt is computed in steps of at most `chunk_tokens`.

`exposed_ms` is the time from the end of P's last layer to D's report that the KV is there;
`total_ms` from the begin of the first layer. `layer_transfer_ms` is what the link's rate allows for
one layer of the last step, `bound_ms` what the push is held to: 1.3 of that and 1 ms where the
transfer is faster than the compute; else the total, 1.05 times the whole transfer and one layer.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from queue import SimpleQueue

import zmq
from report import Report, quantiles

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Message,
    Release,
    ReleaseAck,
    WorkerEndpoint,
)
from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.layout.blocks import GroupBlocks, WantedBlocks
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import Job, PrefillChunk, PullJob, ReceiveJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Recorder, open_trace
from vllm_llmdd_connector.worker.backend import HostBackend
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.engine import DataDistEngine
from vllm_llmdd_connector.worker.peer import PeerThread
from vllm_llmdd_connector.worker.peer_link import PeerContext
from vllm_llmdd_connector.worker.push import Pusher
from vllm_llmdd_connector.worker.step_trace import StepTrace, cache_facts

BENCH = "layer_overlap"
HOST = "127.0.0.1"
ARMS = ("push", "pull")
BLOCK_TOKENS = 128
P_CLUSTER, D_CLUSTER = 1, 2


@dataclass(frozen=True)
class Shape:
    layers: int
    token_bytes: int
    """KV of one token in one layer."""
    max_tokens: int
    chunk_tokens: int

    @property
    def block_len(self) -> int:
        return BLOCK_TOKENS * self.token_bytes


@dataclass(frozen=True)
class Case:
    """One run of one arm."""

    arm: str
    number: int
    tokens: int
    compute_ms: float
    holds_core: bool

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // BLOCK_TOKENS)


class Side:
    """The engine of one side, with KV memory for the longest prompt."""

    def __init__(self, shape: Shape, cluster_id: int, is_producer: bool) -> None:
        self.config = ConnectorConfig(sync_kv_timeout_ms=60_000)
        # One more, because vLLM never gives out block 0.
        num_blocks = -(-shape.max_tokens // BLOCK_TOKENS) + 1
        self._memory: list[mmap.mmap] = []
        regions = []
        for layer in range(shape.layers):
            memory = mmap.mmap(-1, num_blocks * shape.block_len, flags=mmap.MAP_PRIVATE)
            memory[:] = bytes([layer + 1]) * len(memory)  # touched
            base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            regions.append(Region(str(layer), base, shape.block_len, (str(layer),)))
            self._memory.append(memory)
        self.plans = [CachePlan(0, 0, num_blocks, shape.block_len, tuple(regions))]
        backend = HostBackend(self.config)
        self.engine = DataDistEngine(self.config, backend, cluster_id, self.plans, is_producer)

    def fill(self, value: int) -> None:
        for memory in self._memory:
            memory[:] = bytes([value]) * len(memory)

    def holds(self, value: int) -> bool:
        return all(memory[:] == bytes([value]) * len(memory) for memory in self._memory)

    def open_trace(self, folder: str, role: str) -> Recorder | None:
        return open_trace(folder, role, role, "rank 0", caches=cache_facts(self.plans))


def compute(case: Case) -> None:
    """One layer of one step, without the GIL, as an attention kernel."""
    end = time.monotonic() + case.compute_ms / 1000
    if not case.holds_core:
        time.sleep(case.compute_ms / 1000)
        return
    block = b"\0" * 65536
    while time.monotonic() < end:
        zlib.crc32(block)


@dataclass(frozen=True)
class Prefilled:
    """What P saw of one prompt; times of the monotonic clock, which both processes share."""

    begin_s: float
    end_s: float
    hooks_us: list[float]


def prefill(pusher: Pusher, steps: StepTrace | None, shape: Shape, case: Case) -> Prefilled:
    """Compute a prompt step by step with the connector's hooks."""
    hooks_us = []
    begin = time.monotonic()
    done = 0
    while done < case.tokens:
        end = min(done + shape.chunk_tokens, case.tokens)
        first, last = -(-done // BLOCK_TOKENS), -(-end // BLOCK_TOKENS)
        blocks = (tuple(range(first + 1, last + 1)),)
        chunk = PrefillChunk(f"t{case.number}", case.number, case.tokens, blocks, end)
        if steps is not None:
            steps.begin([chunk])
        if case.arm == "push":
            pusher.begin_step([chunk])
        for layer in range(shape.layers):
            compute(case)
            name, start_ns = str(layer), time.perf_counter_ns()
            if steps is not None:
                steps.layer_computed(name)
            pusher.layer_computed(name)
            hooks_us.append((time.perf_counter_ns() - start_ns) / 1000)
        if steps is not None:
            steps.end()
        pusher.end_step()
        done = end
    return Prefilled(begin, time.monotonic(), hooks_us)


def serve(pipe: Connection) -> None:
    """P: compute what the pipe asks for."""
    shape, trace_dir = pipe.recv()
    side = Side(shape, P_CLUSTER, is_producer=True)
    recorder = side.open_trace(trace_dir, "kv_producer")
    steps = None if recorder is None else StepTrace(recorder)
    pusher = Pusher(
        side.engine,
        side.plans,
        [BLOCK_TOKENS],
        time.monotonic,
        TransferStats(),
        recorder or NO_TRACE,
    )
    worker = Server("worker", HOST, 0, lambda: None)
    worker.start(pusher.handle)
    scheduler = Server("scheduler", HOST, 0, lambda: None)
    scheduler.start(confirm)
    pipe.send((side.engine.listen_port, worker.port, scheduler.port))
    with suppress(EOFError):
        while True:
            case: Case = pipe.recv()
            # As a dict: this module has another name in the other process.
            pipe.send(asdict(prefill(pusher, steps, shape, case)))
            pipe.recv()  # D has reported it
            while pusher.num_under_way:
                time.sleep(0.0001)
            pusher.void([case.number])
            pipe.send(None)
    for server in (worker, scheduler):
        server.close()
    pusher.close()
    side.engine.close()
    if recorder is not None:
        recorder.close()


def confirm(message: AnyMessage, reply: Callable[[Message], None]) -> None:
    """P's scheduler: every block is held."""
    if isinstance(message, Release):
        reply(ReleaseAck(claim_id=message.claim_id, production=message.production, valid=True))


@contextmanager
def peer(shape: Shape, trace_dir: str = "") -> Iterator[tuple[Connection, tuple[int, int, int]]]:
    """P in a process of its own; the pipe to it, and its ports."""
    ours, theirs = Pipe()
    command = [sys.executable, str(Path(__file__)), "--worker", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.send((shape, trace_dir))
        try:
            yield ours, ours.recv()
        finally:
            ours.close()  # the end, wherever P is
            process.wait()


class TimedCompletions(Completions):
    """Results with the time at which they were reported."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: SimpleQueue[tuple[float, str]] = SimpleQueue()

    def succeed(self, request_id: str) -> None:
        super().succeed(request_id)
        self._ended.put((time.monotonic(), "received"))

    def fail(self, request_id: str, reason: str) -> None:
        super().fail(request_id, reason)
        self._ended.put((time.monotonic(), reason))

    def wait(self) -> tuple[float, str]:
        """The next result: when it was reported, and ``received`` or why it failed."""
        return self._ended.get()


class Decoder:
    """D: the thread that deals with P, and the wait for its reports."""

    def __init__(self, shape: Shape, ports: tuple[int, int, int], trace_dir: str = "") -> None:
        engine_port, worker_port, self._scheduler_port = ports
        self._side = Side(shape, D_CLUSTER, is_producer=False)
        self._recorder = self._side.open_trace(trace_dir, "kv_consumer")
        self._endpoint = WorkerEndpoint(
            cluster_id=P_CLUSTER, host=HOST, engine_port=engine_port, control_port=worker_port
        )
        self._completions = TimedCompletions()
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context = PeerContext(
            self._side.config,
            self._side.engine,
            self._side.plans,
            self._completions,
            TransferStats(),
            None,
            self._zmq,
            0,
            self._recorder or NO_TRACE,
        )
        address = (HOST, self._scheduler_port)
        self._peer = PeerThread(context, self._endpoint, address, on_end=lambda peer: None)
        self._peer.start()

    def submit(self, case: Case) -> None:
        request_id = f"r{case.number}"
        self._completions.expect(request_id, [])
        self._peer.submit(self._job(request_id, case))

    def give_up(self, case: Case) -> None:
        """As after an abort."""
        self._peer.give_up(f"r{case.number}", "aborted")

    def wait_end(self) -> str:
        """Wait for the request's report: ``received``, or why it failed."""
        return self._completions.wait()[1]

    def wait(self) -> float:
        """When the request was reported."""
        ended_s, end = self._completions.wait()
        if end != "received":
            raise SystemExit(f"a transfer failed: {end}")
        return ended_s

    def keep_reservations(self) -> None:
        """Break what protects D's blocks, to show that a test would notice."""
        self._side.engine.close_reservation = lambda token: None  # type: ignore[method-assign]

    def fill(self, value: int) -> None:
        """Overwrite all blocks, as vLLM may once the request is reported."""
        self._side.fill(value)

    def holds(self, value: int) -> bool:
        """Whether every byte is as ``fill`` left it."""
        return self._side.holds(value)

    def close(self) -> None:
        self._peer.close()
        self._side.engine.close()
        self._zmq.term()
        if self._recorder is not None:
            self._recorder.close()

    def _job(self, request_id: str, case: Case) -> Job:
        blocks = list(range(1, case.num_blocks + 1))
        common = {
            "request_id": request_id,
            "transfer_id": f"t{case.number}",
            "claim_id": case.number,
            "control_address": (HOST, self._scheduler_port),
            "session": 1,
            "workers": (self._endpoint,),
            "loaded_blocks": [],
            "timeout_s": 600.0,
        }
        if case.arm == "push":
            return ReceiveJob(groups=[WantedBlocks(blocks, 0)], **common)  # type: ignore[arg-type]
        group = GroupBlocks(blocks, blocks, 0)
        return PullJob(production=1, secret="s", groups=[group], **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Sample:
    """One request."""

    exposed_ms: float
    total_ms: float
    hooks_us: list[float]


def run(case: Case, pipe: Connection, decoder: Decoder) -> Sample:
    """One request from the first layer to D's report."""
    reported: list[float] = []
    waiter = threading.Thread(target=lambda: reported.append(decoder.wait()))
    waiter.start()
    if case.arm == "push":
        decoder.submit(case)
    pipe.send(case)
    prefilled = Prefilled(**pipe.recv())
    if case.arm == "pull":
        decoder.submit(case)
    waiter.join()
    pipe.send(None)
    pipe.recv()  # P has nothing under way any more
    exposed_s, total_s = reported[0] - prefilled.end_s, reported[0] - prefilled.begin_s
    return Sample(exposed_s * 1000, total_s * 1000, prefilled.hooks_us)


def bound_ms(shape: Shape, case: Case, layer_transfer_ms: float, transfer_ms: float) -> float:
    """What the push is held to: of the exposed time, or of the total."""
    steps = -(-case.tokens // shape.chunk_tokens)
    compute_ms = steps * shape.layers * case.compute_ms
    if layer_transfer_ms <= case.compute_ms:
        return 1.3 * layer_transfer_ms + 1
    return 1.05 * max(compute_ms, transfer_ms) + layer_transfer_ms


def cases(options: argparse.Namespace, shape: Shape) -> Iterator[tuple[Case, float]]:
    """Each case once per arm and repetition, with its link rate in bytes per second."""
    number = 0
    for rate in options.rates:
        for tokens in options.tokens:
            for arm in ARMS:
                for _ in range(options.repeats):
                    number += 1
                    held = options.compute == "hold"
                    yield Case(arm, number, tokens, options.compute_ms, held), rate * 1e9


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tokens", type=lambda t: [int(n) for n in t.split(",")], default=[512, 4096, 65536])
    add("--rates", type=lambda t: [float(n) for n in t.split(",")], default=[0.1, 2.0])
    add("--compute", choices=("sleep", "hold"), default="sleep", help="how a layer is computed")
    add("--compute-ms", type=float, default=2.0, help="per layer and step")
    add("--layers", type=int, default=30)
    add("--token-bytes", type=int, default=128, help="KV of a token in one layer")
    add("--chunk-tokens", type=int, default=8192, help="of one step")
    add("--trace-dir", default="", help="folder for the picture, as the connector's trace_dir")
    add("--repeats", type=int, default=5)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    report = Report()
    shape = Shape(options.layers, options.token_bytes, max(options.tokens), options.chunk_tokens)
    samples: dict[tuple[float, int, str], list[Sample]] = {}
    kinds: dict[tuple[float, int, str], Case] = {}
    with peer(shape, options.trace_dir) as (pipe, ports):
        decoder = Decoder(shape, ports, options.trace_dir)
        run(Case("pull", 0, BLOCK_TOKENS, 0.0, False), pipe, decoder)  # makes the link
        for case, rate in cases(options, shape):
            _engine.testing.set_copy_rate(int(rate))
            key = (rate, case.tokens, case.arm)
            samples.setdefault(key, []).append(run(case, pipe, decoder))
            kinds[key] = case
            report.progress(f"{rate / 1e9:g} GB/s, {case.tokens} tokens, {case.arm}: done")
        decoder.close()
    rows = []
    for (rate, tokens, arm), times in samples.items():
        case = kinds[rate, tokens, arm]
        layer_bytes = min(tokens, shape.chunk_tokens) * shape.token_bytes
        layer_ms = 1000 * layer_bytes / rate
        transfer_ms = 1000 * tokens * shape.token_bytes * shape.layers / rate
        exposed = quantiles([sample.exposed_ms for sample in times])
        total = quantiles([sample.total_ms for sample in times])
        hooks = quantiles([hook for sample in times for hook in sample.hooks_us])
        bound = bound_ms(shape, case, layer_ms, transfer_ms)
        report.line(
            BENCH,
            arm,
            **asdict(shape),
            tokens=tokens,
            compute=options.compute,
            compute_ms=case.compute_ms,
            layer_bytes=layer_bytes,
            rate_gb_per_s=rate / 1e9,
            layer_transfer_ms=round(layer_ms, 3),
            bound_ms=round(bound, 3),
            exposed_ms=exposed,
            total_ms=total,
            hook_us=hooks,
        )
        name = f"{rate / 1e9:g} GB/s {tokens} {arm}"
        shown = round(layer_ms, 2), exposed["p50"], exposed["p99"], total["p50"], round(bound, 2)
        rows.append([name, *shown, hooks["p50"], hooks["p99"]])
    report.progress("")
    header = [
        "rate, tokens, arm",
        "layer ms",
        "exposed p50",
        "p99",
        "total p50",
        "bound",
        "hook us",
        "p99",
    ]
    report.table(header, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        serve(Connection(int(sys.argv[2])))
    else:
        main(sys.argv[1:])
