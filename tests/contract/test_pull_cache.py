"""pull_cache: one row of a contiguous cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contract.cluster import Cluster
from contract.engines import message_mode, remote_mode
from contract.errors import none_error, refused
from contract.fixtures import Pair
from contract.memory import moved


class TestRows:
    def test_c35_c37_row_goes_to_row(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(seed=100), local.add_rows()
        before = local.dump(cache)
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source, 3), cache, 1)
        assert local.dump(cache) == moved(before, peer.dump(source), [(768, 256, 256)])

    def test_c35_size_copies_exactly_that_much(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(seed=100), local.add_rows()
        before = local.dump(cache)
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source, 1), cache, 2, 10)
        assert local.dump(cache) == moved(before, peer.dump(source), [(256, 512, 10)])

    def test_c35_source_row_is_found_by_its_own_stride(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=300, seed=100), local.add_rows(row_bytes=200)
        before = local.dump(cache)
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source, 2), cache, 1)
        assert local.dump(cache) == moved(before, peer.dump(source), [(600, 200, 200)])

    def test_c38_layers_go_to_other_layers(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(tensors=8, seed=100), local.add_rows(tensors=8)
        before, content = local.dump(cache), peer.dump(source)
        local.pull_cache(
            local.api.CacheKeyByIdAndIndex(2, source),
            cache,
            src_layer_range=range(2),
            dst_layer_range=range(2, 4),
        )
        assert local.dump(cache) == before[:4] + moved(before[4:], content[:4], [(0, 0, 256)])

    def test_unknown_option_is_ignored(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(), local.add_rows()
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache, src_cache_offset=8)


class TestRefusals:
    @pytest.mark.parametrize("size", [0, -2])
    def test_c36_size_checked_here(self, pair: Pair, size: int) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(), local.add_rows()
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache, 0, size)

    def test_c36_size_over_either_row(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=100), local.add_rows(row_bytes=256)
        key = local.api.CacheKeyByIdAndIndex(2, source)
        with refused(local.api):
            local.pull_cache(key, cache, 0, 257)
        with refused(local.api):
            local.pull_cache(key, cache, 0, 101)
        with refused(local.api):
            local.pull_cache(key, cache)  # -1 is the local row

    def test_c37_rows_out_of_range(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(rows=4), local.add_rows(rows=2)
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache, 2)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source, 4), cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 99), cache)

    def test_c40_other_number_of_tensors(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(tensors=6), local.add_rows(tensors=4)
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache)

    def test_c47_blocks_caches(self, pair: Pair) -> None:
        local, peer = pair()
        blocks = peer.add_blocks(block_bytes=256, blocks=4)
        cache, own_blocks = local.add_rows(), local.add_blocks()
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, blocks), cache)
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 1), own_blocks)

    @message_mode
    def test_c43_key_that_names_both_or_nothing(self, pair: Pair) -> None:
        local, _ = pair()
        cache, invalid = local.add_rows(), 2**64 - 1
        for key in (local.api.CacheKey(2, invalid), local.api.CacheKey(2, 1, 0, 1)):
            with refused(local.api):
                local.pull_cache(key, cache)

    @remote_mode
    def test_kinds_of_key_by_mode(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_rows()
        for key in (local.api.CacheKey(2, 1), local.api.BlocksCacheKey(2)):
            with pytest.raises(TypeError):
                local.pull_cache(key, cache)
        with pytest.raises(none_error(local.api)):
            local.pull_cache(None, cache)

    def test_c42_own_cluster_and_unlinked_cluster(self, make_local: Callable[..., Cluster]) -> None:
        local = make_local()
        cache = local.add_rows()
        with refused(local.api):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(1, 1), cache)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 1), cache)
        with refused(local.api):  # seen before the missing link
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, 1), cache, 9)
