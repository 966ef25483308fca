"""KvCacheManager: pulls of rows and blocks."""

from __future__ import annotations

import pytest

from contract.actions import pulls
from contract.errors import refused
from contract.fixtures import Linked, MakeFirst
from contract.memory import block_pieces, moved
from contract.peer import Peer

NONE = 2**64 - 1


class TestPull:
    def test_c24_c28_keys_and_consumption(self, linked: Linked) -> None:
        local, peer = linked
        keys = [local.api.CacheKey(2, 10), local.api.CacheKey(2, NONE, 0, 20)]
        source, cache = peer.allocate_rows(keys=keys, seed=100), local.allocate_rows()
        content, before = peer.dump(source), local.dump(cache)
        peer.deallocate(source)
        assert pulls(local, keys[0], cache, batch_index=2)
        assert local.dump(cache) == moved(before, content, [(0, 512, 256)])
        assert not pulls(local, keys[0], cache)
        assert all(pulls(local, keys[1], cache) for _ in range(2))
        peer.remove_key(keys[1])
        assert peer.pool_used() == 0

    def test_c30_offset_keeps_the_key(self, linked: Linked) -> None:
        local, peer = linked
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.allocate_rows()
        assert pulls(local, key, cache, src_cache_offset=0)
        assert pulls(local, key, cache, dst_cache_offset=0)
        assert pulls(local, key, cache)
        assert not pulls(local, key, cache, src_cache_offset=0)

    def test_c31_halves(self, linked: Linked) -> None:
        local, peer = linked
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.allocate_rows(tensors=2)
        for layer in (0, 0, 1):
            assert pulls(local, key, cache, src_layer_range=range(layer, layer + 1))
        assert not pulls(local, key, cache, src_layer_range=range(1))

    def test_c41_offsets(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(seed=100), local.allocate_rows(row_bytes=300)
        key = local.api.CacheKeyByIdAndIndex(2, source, 1)
        before, content = local.dump(cache), peer.dump(source)
        local.pull_cache(key, cache, 2, 50, src_cache_offset=40, dst_cache_offset=100)
        assert local.dump(cache) == moved(before, content, [(296, 700, 50)])
        before = local.dump(cache)
        local.pull_cache(key, cache, 0, dst_cache_offset=200)  # the rest of the local row
        assert local.dump(cache) == moved(before, content, [(256, 200, 100)])

    @pytest.mark.parametrize(
        ("size", "src_offset", "dst_offset"),
        [(100, 0, 201), (1, 0, 300), (100, 157, 0), (1, 256, 0), (-1, 0, 0), (301, 0, 0)],
    )
    def test_c41_offsets_that_do_not_fit(
        self, linked: Linked, size: int, src_offset: int, dst_offset: int
    ) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows(row_bytes=300)
        key = local.api.CacheKeyByIdAndIndex(2, source)
        offsets = {"src_cache_offset": src_offset, "dst_cache_offset": dst_offset}
        with refused(local.api):
            local.pull_cache(key, cache, 0, size, **offsets)

    def test_c41_offset_types(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        for name in ("src_cache_offset", "dst_cache_offset"):
            with pytest.raises(ValueError):
                local.pull_cache(key, cache, **{name: -1})
            with pytest.raises(TypeError):
                local.pull_cache(key, cache, **{name: "0"})

    def test_c44_blocks(self, linked: Linked) -> None:
        local, peer = linked
        source, cache = peer.allocate_blocks(model_id=3, seed=100), local.allocate_blocks()
        key = local.api.BlocksCacheKey(2, 3)
        before = local.dump(cache)
        local.pull_blocks(key, cache, [5, 1, 2], [0, 8, 9])
        after = moved(before, peer.dump(source), block_pieces([5, 1, 2], [0, 8, 9], 64))
        assert local.dump(cache) == after
        for lists in (([], []), ([0], []), ([0, 1], [0]), ([16], [0]), ([0], [16])):
            with refused(local.api):
                local.pull_blocks(key, cache, *lists)

    def test_c42_unlinked(self, make_first: MakeFirst) -> None:
        local = make_first()
        cache = local.allocate_rows()
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 1), cache)

    def test_c48_stopped_peer(self, make_first: MakeFirst, prompt: Peer) -> None:
        local = make_first(timeout_ms=300)
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        source, cache = prompt.allocate_rows(), local.allocate_rows()
        key = local.api.CacheKeyByIdAndIndex(2, source)
        prompt.stop()
        try:
            with refused(local.api, "LLM_WAIT_PROCESS_TIMEOUT"):
                local.pull_cache(key, cache)
        finally:
            prompt.resume()
        assert local.unlink_from(2, prompt.listen_port, force=True).name == "LLM_SUCCESS"
        assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
        local.pull_cache(key, cache)


def test_c87_many_cycles_leave_memory_where_it_was(linked: Linked) -> None:
    local, peer = linked
    cache = local.allocate_rows()
    used = local.pool_used()
    for request in range(300):
        key = local.api.CacheKey(2, request)
        peer.drop(peer.allocate_rows(keys=[key]))
        assert pulls(local, key, cache)
        local.drop(local.allocate_blocks())
    assert (peer.pool_used(), local.pool_used()) == (0, used)
