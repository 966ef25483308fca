"""One rank of D with more P ranks than an engine has links: real engines, threads and sockets."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable, Iterator

import pytest
from fakes.clock import wait_for
from fakes.puller import make_job

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server, new_context
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Message,
    Release,
    ReleaseAck,
    WorkerEndpoint,
)
from vllm_llmdd_connector.datadist._engine import HostEngine
from vllm_llmdd_connector.layout.blocks import GroupBlocks
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.backend import HostBackend
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.engine import DataDistEngine
from vllm_llmdd_connector.worker.peer import PeerThread
from vllm_llmdd_connector.worker.peer_link import PeerContext
from vllm_llmdd_connector.worker.peers import MAX_PEERS, Peers

HOST = "127.0.0.1"
NUM_PEERS = 560
MAX_LINKS = 512
NUM_FILES = 20_000
BLOCK_LEN = 64
D_CLUSTER = 10_000


class Blocks:
    """Memory of one block, all bytes of one value."""

    def __init__(self, value: int) -> None:
        self._memory = mmap.mmap(-1, BLOCK_LEN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.fill(value)

    def fill(self, value: int) -> None:
        self._memory[:] = bytes([value]) * BLOCK_LEN

    @property
    def content(self) -> bytes:
        return self._memory[:]


class Source:
    """The engine of a P rank."""

    def __init__(self, cluster_id: int) -> None:
        self.blocks = Blocks(cluster_id % 256)
        self.engine = HostEngine(cluster_id, True, 60_000, HOST, 0)
        self.engine.register_blocks_cache([1, BLOCK_LEN], 1, True, False, [self.blocks.addr], 0)
        self.endpoint = WorkerEndpoint(
            cluster_id=cluster_id, host=HOST, engine_port=self.engine.listen_port, control_port=0
        )


def confirm(message: AnyMessage, reply: Callable[[Message], None]) -> None:
    """P's scheduler: every block is held."""
    assert isinstance(message, Release)
    reply(ReleaseAck(claim_id=message.claim_id, production=message.production, valid=True))


class Rank:
    """D: an engine with one block, and all its peers."""

    def __init__(self) -> None:
        self.blocks = Blocks(0)
        self.completions = Completions()
        config = ConnectorConfig(request_timeout_s=300.0, link_timeout_ms=60_000)
        plans = [CachePlan(0, 0, 1, BLOCK_LEN, (Region("0", self.blocks.addr, BLOCK_LEN),))]
        self.engine = DataDistEngine(config, HostBackend(config), D_CLUSTER, plans, False)
        self._zmq = new_context()
        context = PeerContext(
            config, self.engine, plans, self.completions, TransferStats(), None, self._zmq, 0
        )
        self.peers = Peers(
            lambda endpoint, address, on_end: PeerThread(context, endpoint, address, on_end)
        )
        self._num_jobs = 0

    def pull(self, source: Source, control_port: int) -> bytes:
        """What is in the block after a pull from there."""
        self._num_jobs += 1
        self.blocks.fill(0)
        job = make_job(
            self._num_jobs,
            control_address=(HOST, control_port),
            groups=[GroupBlocks([0], [0], 0)],
            loaded_blocks=[],
        )
        self.completions.expect(job.request_id, [])
        self.peers.start(job, source.endpoint, None)
        wait_for(lambda: not self.completions.num_waiting, f"job {self._num_jobs}")
        drained = self.completions.drain()
        assert drained is not None
        assert drained.received == {job.request_id}, drained.failed
        return self.blocks.content

    def close(self) -> None:
        self.peers.close()
        self.engine.close()
        self._zmq.term()


@pytest.fixture
def rank() -> Iterator[Rank]:
    """With as many descriptors as vLLM allows its processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_FILES:
        pytest.skip(f"needs {NUM_FILES} descriptors, RLIMIT_NOFILE allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_FILES), hard))
    rank = Rank()
    yield rank
    rank.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def control_port() -> Iterator[int]:
    server = Server("scheduler", HOST, 0, lambda: None)
    server.start(confirm)
    yield server.port
    server.close()


@pytest.mark.timeout(600)
def test_more_peers_than_links_are_served_one_after_the_other(
    rank: Rank, control_port: int
) -> None:
    """The least recently used ones are left, and come back when they are asked again."""
    sources = [Source(cluster_id) for cluster_id in range(1, NUM_PEERS + 1)]
    try:
        for source in [*sources, *sources[:20]]:
            assert rank.pull(source, control_port) == source.blocks.content
            assert len(rank.peers) <= MAX_LINKS
        wait_for(lambda: len(rank.peers) <= MAX_PEERS, "the end of those that retire")
        linked = {peer.endpoint.cluster_id for peer in rank.peers}
        assert {source.endpoint.cluster_id for source in sources[:20]} <= linked
        assert linked.isdisjoint(range(21, 101)), "one used lately was left for an older one"
    finally:
        for source in sources:
            source.engine.finalize()
