"""Copies from memory that both processes have mapped, and when they are made in another way."""

from __future__ import annotations

import logging
import os
import platform
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contract.cluster import Cluster
from contract.engines import (
    HOST_ENGINE,
    Restriction,
    import_engine,
    refused_by_vendor,
)
from contract.errors import refused, wait_until
from contract.fixtures import MakeLocal, MakePeer
from contract.memory import block_pieces, moved, pattern
from contract.peer import Peer

pytestmark = [refused_by_vendor(Restriction.REGISTER_FIRST), pytest.mark.within_a_host]

Pair = Callable[..., tuple[Cluster, Peer]]

PAGE = 4096
MIB = 1 << 20
BLOCK = 5 * PAGE + 64
BLOCKS = 24


@pytest.fixture
def remote() -> bool:
    """How pages are shared does not depend on the mode; pushes by key need this one."""
    return True


def key(side: Cluster, cluster_id: int, model_id: int = 0) -> object:
    return side.api.BlocksCacheKey(cluster_id, model_id)


def shared(side: Cluster | Peer) -> dict[str, int]:
    """Bytes that others may map or have mapped; what earlier tests have left is private again."""
    return {how: size for how, size in side.shared_pages().items() if how != "rw-p"}


def check_pull(
    local: Cluster, peer: Peer, cache: int, source: int, seed: int = 1, model_id: int = 0
) -> None:
    """Pull a random list of blocks and compare every byte of the destination."""
    before, there = local.dump(cache), peer.dump(source)
    dice = random.Random(seed)
    src = [dice.randrange(BLOCKS) for _ in range(BLOCKS // 2)]
    dst = dice.sample(range(BLOCKS), len(src))
    local.pull_blocks(key(local, 2, model_id), cache, src, dst)
    assert local.dump(cache) == moved(before, there, block_pieces(src, dst, BLOCK))


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_pages_are_mapped_read_only_while_they_are_registered(pair: Pair, transport: str) -> None:
    local, peer = pair(transport=transport, share_minimum=PAGE)
    source = peer.add_slabs(3, BLOCKS, BLOCK, first=PAGE)
    cache = local.add_slabs(3, BLOCKS, BLOCK, first=PAGE, seed=100)
    whole_pages = 3 * BLOCKS * BLOCK // PAGE * PAGE
    check_pull(local, peer, cache, source)
    assert shared(local) == {"rw-s": whole_pages, "r--s": whole_pages}
    assert shared(peer) == {"rw-s": whole_pages}
    content = peer.dump(source)
    peer.unregister(source)
    assert shared(peer) == {}
    assert peer.dump(source) == content
    wait_until(lambda: shared(local) == {"rw-s": whole_pages})
    local.unregister(cache)
    assert shared(local) == {}


def test_what_is_written_later_is_read(pair: Pair) -> None:
    local, peer = pair()
    source, cache = peer.add_blocks(4, BLOCKS, BLOCK), local.add_blocks(4, BLOCKS, BLOCK)
    check_pull(local, peer, cache, source)
    peer.flip_byte(source, 2, 7 * BLOCK)
    check_pull(local, peer, cache, source, seed=2)


@pytest.mark.parametrize(
    ("first", "gap", "minimum"),
    [(0, 0, PAGE), (64, 0, PAGE), (PAGE - 64, 0, PAGE), (64, 64, PAGE), (64, 3 * PAGE, PAGE)],
)
def test_random_lists_with_edges(pair: Pair, first: int, gap: int, minimum: int) -> None:
    """Pulls and pushes; edges go by cross-memory attach."""
    local, peer = pair(share_minimum=minimum)
    source = peer.add_slabs(4, BLOCKS, BLOCK, first=first, gap=gap, seed=200)
    cache = local.add_slabs(4, BLOCKS, BLOCK, first=PAGE - first, gap=gap)
    for seed in range(10):
        check_pull(local, peer, cache, source, seed)
        dice = random.Random(seed)
        src, dst = (dice.sample(range(BLOCKS), 5) for _ in range(2))
        expected = moved(peer.dump(source), local.dump(cache), block_pieces(src, dst, BLOCK))
        local.push_blocks(key(local, 2), cache, src, dst)
        assert peer.dump(source) == expected
    assert "r--s" in local.shared_pages()
    assert "r--s" in peer.shared_pages()


def test_large_copies_by_several_threads(pair: Pair) -> None:
    """With more runs than one batch holds, and with the last of two sources of one block."""
    local, peer = pair()
    blocks, size = 2048, 2 * PAGE
    source = peer.add_blocks(3, blocks, size, seed=300)
    cache = local.add_blocks(3, blocks, size)
    dice = random.Random(5)
    for dst in (dice.sample(range(blocks), blocks), [*range(blocks - 1), 0]):
        before = local.dump(cache)
        src = dice.sample(range(blocks), blocks)
        local.pull_blocks(key(local, 2), cache, src, dst)
        pieces = block_pieces(src, dst, size)
        assert local.dump(cache) == moved(before, peer.dump(source), pieces)


def test_two_caches_that_meet_in_a_page(pair: Pair) -> None:
    local, peer = pair(share_minimum=PAGE)
    source = peer.add_slabs(2, BLOCKS, BLOCK, gap=BLOCK, model_id=1)
    first, second = peer.addrs(source)
    assert second // PAGE != first // PAGE
    cache = local.add_slabs(2, BLOCKS, BLOCK)
    check_pull(local, peer, cache, source, model_id=1)
    again = peer.register_again(source, model_id=2)
    check_pull(local, peer, cache, again, seed=2, model_id=2)


def test_memory_that_is_registered_twice_is_shared_until_the_second_is_gone(pair: Pair) -> None:
    local, peer = pair()
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK)
    again = peer.register_again(source, model_id=1)
    pages = shared(peer)
    peer.unregister(source)
    assert shared(peer) == pages
    check_pull(local, peer, cache, again, model_id=1)
    assert local.shared_pages()["r--s"] == pages["rw-s"]
    peer.unregister(again)
    assert "rw-s" not in peer.shared_pages()
    third = peer.register_again(source, model_id=3)
    assert shared(peer) == pages
    check_pull(local, peer, cache, third, seed=3, model_id=3)


def test_new_memory_at_an_old_address(pair: Pair) -> None:
    """What the old pages held must not be read."""
    local, peer = pair()
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK)
    for seed in range(20):
        check_pull(local, peer, cache, source, seed)
        peer.unregister(source)
        peer.flip_byte(source, 0, seed)
        source = peer.register_again(source, model_id=0)


@pytest.mark.parametrize("transports", [("cma", "cma"), ("cma", "auto"), ("auto", "cma")])
def test_cross_memory_attach_where_one_side_asks_for_it(
    make_local: MakeLocal, make_peer: MakePeer, transports: tuple[str, str]
) -> None:
    local, peer = make_local(1, transport=transports[0]), make_peer(2, transport=transports[1])
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK)
    check_pull(local, peer, cache, source)
    assert "r--s" not in local.shared_pages()
    assert ("rw-s" in local.shared_pages()) == (transports[0] == "auto")


@pytest.fixture
def one_sided(make_local: MakeLocal, make_peer: MakePeer) -> Pair:
    """Makes linked clusters of which number 1, here, shares nothing."""

    def make(transport: str = "auto") -> tuple[Cluster, Peer]:
        peer = make_peer(2, transport=transport)
        local = make_local(1, transport=transport, share_memory=False)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        return local, peer

    return make


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_a_side_that_shares_nothing_maps_its_peer(one_sided: Pair, transport: str) -> None:
    """Also for a push of the peer, which this side copies; the peer copies by other means."""
    local, peer = one_sided(transport)
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK, seed=9)
    src, dst = [3, 1, 8, 9], [0, 2, 11, 12]
    pieces = block_pieces(src, dst, BLOCK)
    expected = moved(local.dump(cache), peer.dump(source), pieces)
    peer.push_blocks(key(local, 1), source, src, dst)
    assert local.dump(cache) == expected
    assert set(shared(local)) == {"r--s"}
    check_pull(local, peer, cache, source)
    expected = moved(peer.dump(source), local.dump(cache), pieces)
    local.push_blocks(key(local, 2), cache, src, dst)
    assert peer.dump(source) == expected
    assert set(shared(peer)) == {"rw-s"}


def test_a_side_that_shares_nothing_takes_any_memory(one_sided: Pair, tmp_path: Path) -> None:
    local, peer = one_sided("shm")
    cache = local.add_slabs(2, BLOCKS, BLOCK, file=str(tmp_path / "pages"))
    check_pull(local, peer, cache, peer.add_blocks(2, BLOCKS, BLOCK))
    assert set(shared(local)) == {"r--s"}


@pytest.mark.parametrize("share_memory", [True, False])
def test_only_memory_that_is_shared_becomes_resident(
    make_local: MakeLocal, share_memory: bool
) -> None:
    local = make_local(1, transport="auto", share_memory=share_memory)
    before = local.resident_kib()
    local.add_untouched(64, MIB)
    assert (local.resident_kib() - before >= 48 << 10) == share_memory


@pytest.mark.parametrize("transports", [("shm", "cma"), ("cma", "shm")])
def test_shm_refuses_a_peer_that_does_not_share(
    make_local: MakeLocal, make_peer: MakePeer, transports: tuple[str, str]
) -> None:
    local, peer = make_local(1, transport=transports[0]), make_peer(2, transport=transports[1])
    assert local.link(2, peer.listen_port).name == "LLM_PARAM_INVALID"
    words = "transport differs: local shm, peer has cma"
    assert words in str(local.link_error(2))
    wait_until(lambda: words in str(peer.link_error(1)))


def test_unknown_transport(make_local: MakeLocal) -> None:
    allowed = "auto, shm, cma, nixl"
    with pytest.raises(Exception, match=f"transport is 'tcp', it must be one of: {allowed}"):
        make_local(1, transport="tcp")


def test_memory_of_a_file_is_left_alone(pair: Pair, make_local: MakeLocal, tmp_path: Path) -> None:
    local, peer = pair()
    source = peer.add_slabs(2, BLOCKS, BLOCK, file=str(tmp_path / "pages"))
    check_pull(local, peer, local.add_blocks(2, BLOCKS, BLOCK), source)
    assert "rw-s" not in peer.shared_pages()


def test_shm_refuses_memory_of_a_file(make_local: MakeLocal, tmp_path: Path) -> None:
    local = make_local(1, transport="shm")
    with refused(local.api, says="transport is 'shm', but memory ["):
        local.add_slabs(2, BLOCKS, BLOCK, file=str(tmp_path / "pages"))


@pytest.fixture
def scarce(pair: Pair) -> Iterator[tuple[Cluster, Peer]]:
    """A pair whose peer cannot share all it wants."""
    local, peer = pair()
    peer.limit_shared_memory(32 * MIB)
    yield local, peer
    peer.limit_shared_memory(0)


def test_what_there_is_no_memory_for_is_not_shared(scarce: tuple[Cluster, Peer]) -> None:
    local, peer = scarce
    size = 40 * MIB // 16
    source = peer.add_blocks(1, 16, size, seed=400)
    assert shared(peer) == {"rw-s": 32 * MIB}
    cache = local.add_blocks(1, 16, size)
    before = local.dump(cache)
    src, dst = [15, 3, 9], [0, 1, 15]
    local.pull_blocks(key(local, 2), cache, src, dst)
    pieces = block_pieces(src, dst, size)
    assert local.dump(cache) == moved(before, peer.dump(source), pieces)
    peer.unregister(source)
    assert "rw-s" not in peer.shared_pages()


def test_shm_refuses_when_there_is_no_memory(make_peer: MakePeer) -> None:
    peer = make_peer(2, transport="shm")
    peer.limit_shared_memory(PAGE)
    try:
        with refused(import_engine(HOST_ENGINE), "LLM_OUT_OF_MEMORY", says="not enough memory"):
            peer.add_blocks(4, BLOCKS, BLOCK)
    finally:
        peer.limit_shared_memory(0)
    assert "rw-s" not in peer.shared_pages()
    peer.add_blocks(4, BLOCKS, BLOCK)


def test_what_is_not_shared_is_said_without_a_lock(make_local: MakeLocal) -> None:
    """A handler of the log, or a collection of garbage while it runs, may give a cache back; that
    once waited for the lock under which the sentence was logged."""
    local = make_local(1, pool=f'{{"memory_size": {4 * MIB}, "page_shift": 16}}')
    first = local.allocate_blocks(1, 16, 4096)
    given_back = []

    class GivesBack(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not given_back:
                given_back.append(record.getMessage())
                local.deallocate(first)

    handler, logger = GivesBack(), logging.getLogger("vllm_llmdd_connector")
    local.limit_shared_memory(PAGE)
    logger.addHandler(handler)
    try:
        local.allocate_blocks(1, 16, 8192)
    finally:
        logger.removeHandler(handler)
        local.limit_shared_memory(0)
    assert "is not shared" in given_back[0]


def test_a_limit_of_file_sizes_is_no_signal(pair: Pair) -> None:
    local, peer = pair()
    peer.limit_file_size(PAGE)
    try:
        source = peer.add_blocks(4, BLOCKS, BLOCK)
    finally:
        peer.limit_file_size(-1)
    assert "rw-s" not in peer.shared_pages()
    check_pull(local, peer, local.add_blocks(4, BLOCKS, BLOCK), source)


def test_a_forked_child_writes_its_own_copy(pair: Pair) -> None:
    local, peer = pair()
    cache, source = local.add_blocks(2, BLOCKS, BLOCK), peer.add_blocks(2, BLOCKS, BLOCK)
    before = local.dump(cache)
    child = os.fork()
    if child == 0:
        same = local.dump(cache) == before
        local.tensors[cache][0].write(pattern(900, BLOCK))
        written = local.tensors[cache][0].read()[:BLOCK] == pattern(900, BLOCK)
        os._exit(0 if same and written else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert local.dump(cache) == before
    local.push_blocks(key(local, 2), cache, [0], [5])
    assert peer.dump(source)[0][5 * BLOCK : 6 * BLOCK] == before[0][:BLOCK]


def test_pages_go_with_the_link(pair: Pair) -> None:
    local, peer = pair()
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK)
    for cycle in range(100):
        check_pull(local, peer, cache, source, cycle)
        assert "r--s" in local.shared_pages()
        if cycle == 0:
            before = local.descriptors(), peer.descriptors()
        assert local.unlink(2, force=cycle % 2 == 0).name == "LLM_SUCCESS"
        assert "r--s" not in local.shared_pages()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    wait_until(lambda: (local.descriptors(), peer.descriptors()) <= before)


def test_pages_of_a_dead_peer_go_with_its_link(pair: Pair) -> None:
    local, peer = pair()
    cache, source = local.add_blocks(4, BLOCKS, BLOCK), peer.add_blocks(4, BLOCKS, BLOCK)
    check_pull(local, peer, cache, source)
    content = local.dump(cache)
    peer.kill()
    with refused(local.api, "LLM_FAILED"):
        local.pull_blocks(key(local, 2), cache, [0], [0])
    assert local.dump(cache) == content
    wait_until(lambda: "r--s" not in local.shared_pages())


def test_allocated_caches_are_shared(pair: Pair) -> None:
    local, peer = pair(pool='{"memory_size": 8388608, "page_shift": 16}')
    source, cache = peer.allocate_blocks(4, BLOCKS, BLOCK), local.allocate_blocks(4, BLOCKS, BLOCK)
    check_pull(local, peer, cache, source)
    assert "r--s" in local.shared_pages()
    for number in range(3):
        peer.deallocate(source)
        source = peer.allocate_blocks(4, BLOCKS, BLOCK, seed=number)
        check_pull(local, peer, cache, source, seed=number)
    peer.deallocate(source)
    assert "rw-s" not in peer.shared_pages()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_memory_of_a_thread_with_a_numa_policy_is_shared(pair: Pair) -> None:
    """vLLM's CPU workers bind themselves; their memory has no policy of its own."""
    local, peer = pair()
    peer.bind_thread(is_bound=True)
    try:
        source = peer.add_blocks(4, BLOCKS, BLOCK)
    finally:
        peer.bind_thread(is_bound=False)
    check_pull(local, peer, local.add_blocks(4, BLOCKS, BLOCK), source)
    assert "r--s" in local.shared_pages()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of system calls")
def test_memory_that_is_bound_by_itself_stays_where_it_is(make_local: MakeLocal) -> None:
    local = make_local(1)
    local.add_bound()
    assert "rw-s" not in local.shared_pages()
