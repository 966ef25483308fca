"""What peers may still do with memory that was given up, and when it is free again."""

from __future__ import annotations

from collections.abc import Callable

from contract.cluster import Cluster
from contract.engines import Restriction, message_mode, refused_by_vendor, remote_mode
from contract.errors import refused
from contract.fixtures import MakeLocal
from contract.peer import Peer

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

Pair = Callable[..., tuple[Cluster, Peer]]

PAGE = 4096
POOL = f'{{"memory_size": {4 * PAGE}, "page_shift": 12}}'


@remote_mode
def test_deallocated_cache_is_no_destination_of_a_push(pair: Pair) -> None:
    """Its row is kept for the key's reader. A push by cache id once still changed it."""
    local, peer = pair(pool=POOL)
    api = local.api
    target = peer.allocate_rows(keys=[api.CacheKey(2, 7)], seed=100)
    content = peer.dump(target)
    peer.deallocate(target)
    with refused(api, "LLM_KV_CACHE_NOT_EXIST"):
        local.push_cache(api.CacheKeyByIdAndIndex(2, target), local.add_rows())
    blocks = local.add_blocks(blocks=4)
    local.pull_blocks(api.CacheKey(2, 7), blocks, [], [0, 1, 2, 3])
    assert local.dump(blocks) == [tensor[:256] for tensor in content]


@message_mode
def test_memory_is_free_when_a_refused_pull_has_returned(pair: Pair) -> None:
    """The peer once still held the row while it answered, so that the memory could be missing for
    the next allocation."""
    local, peer = pair(pool=POOL)
    cache = local.add_rows(row_bytes=512)
    for _ in range(300):
        source = peer.allocate_rows(row_bytes=256)
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache)
        peer.deallocate(source)
        assert peer.pool_used() == 0


def test_open_reservation_keeps_no_memory(make_local: MakeLocal) -> None:
    """A deallocated cache once kept its pages until its last reservation was closed."""
    local = make_local(pool=POOL)
    cache = local.allocate_blocks(2, 1, 64)
    token = local.open_reservation(cache, [0])
    local.deallocate(cache)
    assert local.pool_used() == 0
    local.close_reservation(token)
    assert local.pool_used() == 0
