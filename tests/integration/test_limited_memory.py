"""A source in a control group with less memory than it would share: it lives, and is copied from.

The kernel answers a ``fallocate`` beyond such a limit by killing the process, and the page that a
fault finds no memory for likewise; so the engine looks at the limit before it takes memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from contract.cluster import Cluster
from contract.engines import HOST_ENGINE, import_engine
from contract.errors import refused
from contract.memory import block_pieces, moved, pattern
from contract.peer import Peer
from fakes.memory_group import MemoryGroup, memory_group

from vllm_llmdd_connector.datadist import BlocksCacheKey

MIB = 1 << 20
TENSORS, BLOCKS, BLOCK = 16, 16, 384 << 10
SIZE = TENSORS * BLOCKS * BLOCK
ROOM = 30 * MIB
"""Beyond the memory itself: less than the engine wants to leave, enough for one tensor's making."""
SEED = 400


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group() as made:
        yield made


@pytest.fixture
def start(group: MemoryGroup) -> Iterator[Callable[[str], Peer]]:
    """Makes cluster 2 in a process of the group."""
    peers: list[Peer] = []

    def started(transport: str) -> Peer:
        peers.append(Peer(*group.wrapper))
        peers[-1].create(2, transport=transport)
        return peers[-1]

    yield started
    for peer in peers:
        peer.close()


@pytest.fixture
def local() -> Iterator[Cluster]:
    cluster = Cluster(1)
    yield cluster
    cluster.discard()


def check_pull(local: Cluster, peer: Peer) -> None:
    """The peer has no memory to tell what it holds."""
    cache = local.add_blocks(TENSORS, BLOCKS, BLOCK)
    before = local.dump(cache)
    content = [pattern(SEED + number, BLOCKS * BLOCK) for number in range(TENSORS)]
    src, dst = [15, 3, 9], [0, 1, 15]
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    local.pull_blocks(BlocksCacheKey(2), cache, src, dst)
    assert local.dump(cache) == moved(before, content, block_pieces(src, dst, BLOCK))


def test_memory_beyond_the_limit_stays_private_with_one_warning(
    group: MemoryGroup,
    start: Callable[[str], Peer],
    local: Cluster,
    capfd: pytest.CaptureFixture[str],
) -> None:
    peer = start("auto")
    group.leave(SIZE + ROOM)
    peer.add_blocks(TENSORS, BLOCKS, BLOCK, seed=SEED)
    peer.add_blocks(1, 1, MIB, model_id=1)
    assert "rw-s" not in peer.shared_pages()
    check_pull(local, peer)
    warnings = capfd.readouterr().err
    assert warnings.count("some registered memory is not shared") == 1
    assert "the memory limit of its control group leaves" in warnings


def test_as_much_as_the_limit_allows_is_shared(
    group: MemoryGroup, start: Callable[[str], Peer], local: Cluster
) -> None:
    """Contents move piece by piece: twice the memory would be beyond the limit."""
    peer = start("auto")
    group.leave(SIZE + 2 * ROOM)
    peer.add_blocks(TENSORS, BLOCKS, BLOCK, seed=SEED)
    assert peer.shared_pages()["rw-s"] == SIZE
    check_pull(local, peer)


def test_shm_refuses_memory_beyond_the_limit(
    group: MemoryGroup, start: Callable[[str], Peer]
) -> None:
    peer = start("shm")
    group.leave(SIZE + ROOM)
    with refused(
        import_engine(HOST_ENGINE),
        "LLM_OUT_OF_MEMORY",
        says="the memory limit of its control group",
    ):
        peer.add_blocks(TENSORS, BLOCKS, BLOCK)
    assert "rw-s" not in peer.shared_pages()
    group.leave(1000 * MIB)
    peer.add_blocks(TENSORS, BLOCKS, BLOCK)
