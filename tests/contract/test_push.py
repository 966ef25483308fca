"""push_blocks and push_cache: the peer checks and copies, into its own registered memory only."""

from __future__ import annotations

import pytest

from contract.engines import message_mode, remote_mode
from contract.errors import none_error, refused
from contract.fixtures import Pair
from contract.memory import block_pieces, moved


@remote_mode
class TestPushBlocks:
    @pytest.mark.parametrize(
        ("src", "dst"),
        [([0], [15]), ([4, 5, 6], [1, 2, 3]), ([15, 14, 13], [0, 2, 1]), ([3, 3], [7, 8])],
    )
    def test_c51_any_pairs_arrive_and_other_bytes_stay(
        self, pair: Pair, src: list[int], dst: list[int]
    ) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        local.push_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert peer.dump(target) == moved(before, local.dump(cache), block_pieces(src, dst, 64))

    def test_both_ends_of_a_link_push(self, pair: Pair) -> None:
        local, peer = pair()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        before = local.dump(cache)
        peer.push_blocks(local.api.BlocksCacheKey(1), source, [2], [9])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([2], [9], 64))

    def test_numbers_of_blocks_may_differ(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(blocks=2, seed=100), peer.add_blocks(blocks=50)
        before = peer.dump(target)
        local.push_blocks(local.api.BlocksCacheKey(2), cache, [1], [49])
        assert peer.dump(target) == moved(before, local.dump(cache), block_pieces([1], [49], 64))

    def test_layers_go_to_other_layers(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(tensors=4, seed=100), peer.add_blocks(tensors=8)
        before, content = peer.dump(target), local.dump(cache)
        local.push_blocks(
            local.api.BlocksCacheKey(2),
            cache,
            [1],
            [2],
            src_layer_range=range(1, 2),
            dst_layer_range=range(3, 4),
        )
        after = moved(before[6:], content[2:], block_pieces([1], [2], 64))
        assert peer.dump(target) == before[:6] + after

    def test_one_tensor_per_layer(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(tensors=3, seed=100), peer.add_blocks(tensors=3)
        before = peer.dump(target)
        local.push_blocks(local.api.BlocksCacheKey(2), cache, [1], [2], tensor_num_per_layer=1)
        assert peer.dump(target) == moved(before, local.dump(cache), block_pieces([1], [2], 64))

    @pytest.mark.parametrize(
        ("src", "dst"), [([], [1]), ([1], []), ([1, 2], [1]), ([16], [0]), ([0], [16])]
    )
    def test_c51_lists_that_do_not_fit(self, pair: Pair, src: list[int], dst: list[int]) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(seed=100), peer.add_blocks()
        before = peer.dump(target)
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert peer.dump(target) == before

    def test_other_block_size_or_number_of_tensors(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(block_bytes=32, model_id=0)
        peer.add_blocks(tensors=2, model_id=1)
        cache = local.add_blocks()
        for model_id in (0, 1):
            with refused(local.api):
                local.push_blocks(local.api.BlocksCacheKey(2, model_id), cache, [0], [0])

    def test_c54_unknown_caches_and_clusters(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_blocks()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.push_blocks(local.api.BlocksCacheKey(2, 5), cache, [0], [0])
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.push_blocks(local.api.BlocksCacheKey(3), cache, [0], [0])
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(1), cache, [0], [0])
        local.unregister(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_ranges_of_different_length(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks()
        with refused(local.api):
            local.push_blocks(
                local.api.BlocksCacheKey(2), cache, [0], [0], dst_layer_range=range(1)
            )

    def test_remote_layers_out_of_range(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(tensors=4)
        cache = local.add_blocks(tensors=4)
        with refused(local.api):
            local.push_blocks(
                local.api.BlocksCacheKey(2), cache, [0], [0], dst_layer_range=range(1, 3)
            )

    def test_tensors_that_do_not_divide_into_layers(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(tensors=3)
        cache = local.add_blocks(tensors=3)
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_contiguous_source(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_rows()
        with refused(local.api):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_wrong_kind_of_key(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_blocks()
        for key in (local.api.CacheKeyByIdAndIndex(2, 1), local.api.CacheKey(2, 1)):
            with pytest.raises(TypeError):
                local.push_blocks(key, cache, [0], [0])
        with pytest.raises(none_error(local.api)):
            local.push_blocks(None, cache, [0], [0])


@remote_mode
class TestPushCache:
    def test_c50_row_goes_to_row(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_rows(seed=100), peer.add_rows(rows=9)
        before = peer.dump(target)
        local.push_cache(local.api.CacheKeyByIdAndIndex(2, target, 8), cache, 3)
        assert peer.dump(target) == moved(before, local.dump(cache), [(768, 2048, 256)])

    def test_layers_go_to_other_layers(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_rows(tensors=8, seed=100), peer.add_rows(tensors=8)
        before, content = peer.dump(target), local.dump(cache)
        local.push_cache(
            local.api.CacheKeyByIdAndIndex(2, target),
            cache,
            src_layer_range=range(2),
            dst_layer_range=range(2, 4),
        )
        assert peer.dump(target) == before[:4] + moved(before[4:], content[:4], [(0, 0, 256)])

    def test_c50_refusals(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_rows(), peer.add_rows()
        blocks = peer.add_blocks(blocks=4, block_bytes=256)
        other = peer.add_rows(row_bytes=128)
        own_blocks = local.add_blocks()
        key = local.api.CacheKeyByIdAndIndex
        before = peer.dump(target)
        with refused(local.api):
            local.push_cache(key(2, target), cache, 4)
        with refused(local.api):
            local.push_cache(key(2, target, 4), cache)
        with refused(local.api):
            local.push_cache(key(2, target), cache, size=256)
        with refused(local.api):
            local.push_cache(key(2, blocks), cache)
        with refused(local.api):
            local.push_cache(key(2, other), cache)
        with refused(local.api):
            local.push_cache(key(2, target), own_blocks)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.push_cache(key(2, 99), cache)
        with pytest.raises(TypeError):
            local.push_cache(local.api.BlocksCacheKey(2), cache)
        assert peer.dump(target) == before


@message_mode
def test_c49_message_mode_has_no_push(pair: Pair) -> None:
    local, peer = pair()
    peer.add_blocks()
    blocks, rows = local.add_blocks(), local.add_rows()
    with refused(local.api):
        local.push_blocks(local.api.BlocksCacheKey(2), blocks, [0], [0])
    with refused(local.api):
        local.push_cache(local.api.CacheKeyByIdAndIndex(2, 1), rows)


@remote_mode
class TestUnregisteringDestination:
    def test_nothing_is_written_after_unregistering(self, pair: Pair) -> None:
        local, peer = pair()
        cache, target = local.add_blocks(seed=100), peer.add_blocks()
        local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.unregister(target)
        before = peer.dump(target)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [1], [1])
        assert peer.dump(target) == before
