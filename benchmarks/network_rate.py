"""How fast a link between two namespaces is: for a plain TCP stream, and for this engine over it.

The two take turns between the same two processes, which move the same number of bytes from P's
side to D's: one stream socket that stays open, and `pull_blocks` of scattered blocks with
`transport: nixl`.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_transfer import MIB, Memory, NixlTransportSide, Settings, block_lists
from netns import Side
from worker_process import Process, serve

SETTINGS = Settings(
    iterations=15, working_set_mib=128, batch_mib=48, block_bytes=(16 << 10, 96 << 10)
)
"""A batch is a whole number of both sizes of block."""
_CHUNK = 1 << 20


class NetworkEngine(NixlTransportSide):
    """An engine that listens on the link."""

    def __init__(self, host: str, initiator: bool, memory: Memory) -> None:
        self.host = host
        super().__init__(SETTINGS, initiator, memory)


class End:
    """What runs in a namespace: an engine, and one end of a TCP stream."""

    def __init__(self, host: str, is_initiator: bool) -> None:
        self._memory = Memory(SETTINGS.working_set_mib * MIB, filled=not is_initiator)
        self._engine = NetworkEngine(host, is_initiator, self._memory)
        self._listener = socket.create_server((host, 0))
        self._stream: socket.socket | None = None

    def offer(self) -> Any:
        return self._engine.offer(), self._listener.getsockname()[1]

    def connect(self, offer: Any) -> None:
        """The initiator's; the other end accepts with its first `send`."""
        engine, port = offer
        self._engine.connect(engine)
        self._stream = socket.create_connection((engine[0], port))

    def pull(self, block_bytes: int, batch: int) -> float:
        src, dst = block_lists(SETTINGS, block_bytes, "scattered", batch)
        begin = time.perf_counter()
        self._engine.run("read", block_bytes, src, dst)
        return time.perf_counter() - begin

    def send(self, num_bytes: int) -> None:
        """When the other end has asked for them."""
        if self._stream is None:
            self._stream, _ = self._listener.accept()
        self._stream.recv(1)
        chunk = bytes(_CHUNK)
        for _ in range(num_bytes // _CHUNK):
            self._stream.sendall(chunk)

    def receive(self, num_bytes: int) -> float:
        """Seconds from asking to the last byte."""
        assert self._stream is not None
        buffer = bytearray(_CHUNK)
        begin = time.perf_counter()
        self._stream.sendall(b"\0")
        while num_bytes > 0:
            received = self._stream.recv_into(buffer)
            if received == 0:
                raise ConnectionError("the stream has ended")
            num_bytes -= received
        return time.perf_counter() - begin


@dataclass
class Rates:
    """MB/s, turn by turn."""

    tcp: list[float] = field(default_factory=list)
    pull: list[float] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)
    """What D's side of the link has received during each pull."""


class LinkRates:
    """Both ends of one link, D's the initiator."""

    def __init__(self, source: Process, sink: Process, side: Side) -> None:
        self._source, self._sink, self._side = source, sink, side
        sink.call("connect", source.call("offer"))
        self._turn = 0

    def measure(self, block_bytes: int, turns: int) -> Rates:
        """The first turn of each is a warm-up."""
        rates, num_bytes = Rates(), SETTINGS.batch_mib * MIB
        for turn in range(turns + 1):
            self._source.begin("send", num_bytes)
            tcp_s = self._sink.call("receive", num_bytes)
            self._source.end()
            before = self._side.received_bytes()
            pull_s = self._sink.call("pull", block_bytes, self._turn)
            crossed = self._side.received_bytes() - before
            self._turn += 1
            if turn:
                rates.tcp.append(num_bytes / tcp_s / 1e6)
                rates.pull.append(num_bytes / pull_s / 1e6)
                rates.link_bytes.append(float(crossed))
        return rates


@contextmanager
def link_rates(source: Side, sink: Side, cpus: tuple[str, str]) -> Iterator[LinkRates]:
    """The processes are ended on exit."""
    with ExitStack() as stack:
        ends = []
        for side, cpu in zip((source, sink), cpus, strict=True):
            pinned = ("taskset", "-c", cpu, sys.executable, str(Path(__file__).resolve()))
            end = Process(
                (*side.wrapper, *pinned),
                *(side.transfer_host, side is sink),
                environment=side.environment,
            )
            stack.callback(end.close)
            ends.append(end)
        yield LinkRates(*ends, sink)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[2])), End)
