"""What grows with the number of peers, leases and claims, and how.

    python benchmarks/bench_growth.py [--links 1,8,64,512] [--leases 16,256,4096]

* ``links``: one engine with so many links at once, as a P with as many decode ranks or the reverse:
  the time to make one more, a pull of a 4 KiB row over one of them, descriptors, threads and memory
  a link costs the engine's process, and its processor time while nothing happens.
* ``leases``: P's table with so many leases: a claim, a renewal, a release by the last rank, and
  the step that takes the ended ones.
* ``messages``: bytes of the control messages of one request of 8,192 blocks, pulled and pushed, and
  the time to encode and decode all of them.

Results are JSON lines on stdout. Nothing here depends on real servers.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from report import Report, quantiles

from vllm_llmdd_connector.control.messages import (
    Admitted,
    Announce,
    BlockSpan,
    CacheToken,
    Claim,
    Done,
    Grant,
    Message,
    Queued,
    Release,
    ReleaseAck,
    Reserve,
    decode,
    encode,
)
from vllm_llmdd_connector.datadist._engine import HostEngine
from vllm_llmdd_connector.scheduler.lease import LeaseTable

BENCH = "growth"
HOST = "127.0.0.1"
HUB_CLUSTER = 1_000_000
ROW_BYTES = 4096
BLOCKS_KEY_KIND = 2
PULLS = 200
IDLE_S = 3.0
PROMPT_BLOCKS = 8_192
TIMEOUT_MS = 10_000
SECRET = "0" * 32
PROMPT_HASH = "0" * 64


class RowEngine:
    """An engine with a blocks cache of one 4 KiB block."""

    def __init__(self, cluster_id: int, listens: bool) -> None:
        self._memory = mmap.mmap(-1, ROW_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory[:] = b"\x5a" * ROW_BYTES
        addr = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.engine = HostEngine(cluster_id, True, TIMEOUT_MS, HOST if listens else "", 0)
        self.cache_id = self.engine.register_blocks_cache([1, ROW_BYTES], 1, True, False, [addr], 0)

    def pull(self, cluster_id: int) -> None:
        """The peer's only block."""
        block = array("Q", [0])
        ref = (BLOCKS_KEY_KIND, 0, 0, 0)
        self.engine.pull_blocks(cluster_id, ref, self.cache_id, block, block, None, None, 1)


def usage() -> dict[str, float]:
    """Of this process: what it holds, and the processor time it has used."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
        "rss_kib": int(status["VmRSS"].split()[0]),
        "cpu_s": time.process_time(),
    }


def serve(pipe: Connection) -> None:
    """The process with the many links: tells its use whenever it is asked."""
    hub = RowEngine(HUB_CLUSTER, listens=True)
    pipe.send(hub.engine.listen_port)
    while pipe.recv():
        pipe.send(usage())
    hub.engine.finalize()


@contextmanager
def hub_process() -> Iterator[Connection]:
    ours, theirs = Pipe()
    command = [sys.executable, str(Path(__file__)), "--hub", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            yield ours
        finally:
            ours.send(False)
            process.wait()


def timed_us(action: Callable[[], object]) -> float:
    start_ns = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start_ns) / 1000


def ask(pipe: Connection) -> dict[str, float]:
    pipe.send(True)
    answer: dict[str, float] = pipe.recv()
    return answer


def bench_links(report: Report, counts: list[int]) -> None:
    with hub_process() as pipe:
        port = pipe.recv()
        before = ask(pipe)
        peers: list[RowEngine] = []
        for count in sorted(counts):
            link_us = []
            while len(peers) < count:
                peer = RowEngine(len(peers) + 1, listens=False)
                link_us.append(timed_us(partial(link_to, peer, port)))
                peers.append(peer)
            pulls_us = [timed_us(lambda: peers[-1].pull(HUB_CLUSTER)) for _ in range(PULLS)]
            now = ask(pipe)
            time.sleep(IDLE_S)
            idle_s = ask(pipe)["cpu_s"] - now["cpu_s"]
            report.line(
                BENCH,
                "links",
                links=count,
                link_us=quantiles(link_us),
                pull_us=quantiles(pulls_us),
                fds_per_link=round((now["fds"] - before["fds"]) / count, 2),
                threads_per_link=round((now["threads"] - before["threads"]) / count, 2),
                rss_kib_per_link=round((now["rss_kib"] - before["rss_kib"]) / count, 1),
                idle_cores=round(idle_s / IDLE_S, 4),
            )
            report.progress(f"{count} links: done")
        for peer in peers:
            peer.engine.unlink([HUB_CLUSTER], TIMEOUT_MS, False)
            peer.engine.finalize()


def link_to(peer: RowEngine, port: int) -> None:
    statuses = peer.engine.link([(HUB_CLUSTER, HOST, port, "")], TIMEOUT_MS)
    if statuses != [0]:
        raise SystemExit(f"a link failed with status {statuses}")


def each_us(action: Callable[[int], object], count: int) -> list[float]:
    """The action's time for each number from 1."""
    return [timed_us(partial(action, number)) for number in range(1, count + 1)]


def bench_leases(report: Report, count: int) -> None:
    table = LeaseTable(30.0, 300.0, 1)
    for number in range(count):
        blocks = tuple(range(64 * number, 64 * (number + 1)))
        table.open(f"r{number}", SECRET, PROMPT_HASH, [blocks], blocks, now_s=0.0)
    report.line(
        BENCH,
        "leases",
        leases=count,
        claim_us=quantiles(each_us(lambda n: table.claim(n, SECRET, PROMPT_HASH, n, 1.0), count)),
        renew_us=quantiles(each_us(lambda n: table.renew(n, 2.0), count)),
        release_us=quantiles(each_us(lambda n: table.release(n, SECRET, n, 0), count)),
        take_ended_us_per_lease=round(timed_us(lambda: table.take_ended(3.0)) / count, 3),
    )


def messages() -> dict[str, list[Message]]:
    """What goes to and fro for one request, by flow; numbers as long as they come."""
    blocks = tuple(range(100_000, 100_000 + PROMPT_BLOCKS))
    session, claim_id, reservation = 2**62, 2**60, 2**61
    claim = Claim(
        session=session,
        claim_id=claim_id,
        production=1_000_000,
        secret=SECRET,
        prompt_hash=PROMPT_HASH,
    )
    grant = Grant(claim_id=claim_id, production=1_000_000, secret=SECRET, block_ids=(blocks,))
    announce = Announce(
        session=session,
        claim_id=claim_id,
        transfer_id=SECRET,
        num_tokens=131_072,
        prompt_hash=PROMPT_HASH,
        takes_push=True,
        has_blocks=False,
    )
    reserve = Reserve(
        to_cluster=2**47,
        cluster_id=2**47,
        transfer_id=SECRET,
        reservation=reservation,
        spans=(BlockSpan(first=0, count=PROMPT_BLOCKS),),
        tokens=(CacheToken(model_id=0, token=2**62),),
        link_number=2**50,
    )
    done = Done(transfer_id=SECRET, reservation=reservation, production=1_000_000)
    release = Release(
        session=session, claim_id=claim_id, rank=0, production=1_000_000, secret=SECRET
    )
    ack = ReleaseAck(claim_id=claim_id, production=1_000_000, valid=True)
    queued, admitted = Queued(claim_id=claim_id), Admitted(claim_id=claim_id)
    return {
        "pull": [claim, grant, release, ack],
        "push": [announce, queued, admitted, reserve, done, release, ack],
    }


def bench_messages(report: Report, flow: str, sent: list[Message]) -> None:
    """Sizes on the wire, without ZMQ's few bytes of framing."""
    sizes = {type(message).__name__.lower(): len(encode(message)) for message in sent}

    def code() -> None:
        for message in sent:
            decode(encode(message))

    report.line(
        BENCH,
        "messages",
        flow=flow,
        blocks=PROMPT_BLOCKS,
        num_messages=len(sent),
        bytes=sizes,
        total_bytes=sum(sizes.values()),
        code_us=quantiles([timed_us(code) for _ in range(50)]),
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--links", type=numbers, default=[1, 8, 64, 512])
    parser.add_argument("--leases", type=numbers, default=[16, 256, 4096])
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    report = Report()
    bench_links(report, options.links)
    for count in options.leases:
        bench_leases(report, count)
    for flow, sent in messages().items():
        bench_messages(report, flow, sent)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hub"]:
        serve(Connection(int(sys.argv[2])))
    else:
        main(sys.argv[1:])
