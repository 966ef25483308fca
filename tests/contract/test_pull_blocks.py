"""pull_blocks: blocks to blocks, and a contiguous row to blocks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import none_error, refused
from contract.fixtures import Pair
from contract.memory import block_pieces, moved


def test_comparison_notices_one_flipped_byte(pair: Pair) -> None:
    """The other tests compare by bytes; this one shows that the comparison can fail."""
    local, peer = pair()
    source, cache = peer.add_blocks(seed=100), local.add_blocks()
    local.pull_blocks(local.api.BlocksCacheKey(2), cache, [3], [5])
    expected = moved(local.dump(cache), peer.dump(source), block_pieces([3], [5], 64))
    assert local.dump(cache) == expected
    local.flip_byte(cache, 2, 5 * 64 + 17)
    assert local.dump(cache) != expected


class TestBlocksToBlocks:
    @pytest.mark.parametrize(
        ("src", "dst"),
        [
            ([0], [15]),
            ([4, 5, 6], [1, 2, 3]),
            ([15, 14, 13, 12], [0, 1, 2, 3]),
            (list(range(16)), list(range(16))),
            ([3, 3, 3], [7, 8, 2]),
        ],
    )
    def test_c44_any_pairs_arrive_and_other_bytes_stay(
        self, pair: Pair, src: list[int], dst: list[int]
    ) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(seed=100), local.add_blocks(seed=200)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces(src, dst, 64))

    def test_c44_random_permutations_arrive(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(blocks=100, seed=100), local.add_blocks(blocks=100)
        content = peer.dump(source)
        dice = random.Random(7)
        for _ in range(50):
            count = dice.randint(1, 100)
            src, dst = dice.sample(range(100), count), dice.sample(range(100), count)
            before = local.dump(cache)
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
            assert local.dump(cache) == moved(before, content, block_pieces(src, dst, 64))

    def test_of_two_sources_for_one_block_the_last_wins(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1, 2], [5, 5])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([2], [5], 64))

    def test_numbers_of_blocks_may_differ(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(blocks=100, seed=100), local.add_blocks(blocks=3)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [99, 0], [0, 2])
        assert local.dump(cache) == moved(
            before, peer.dump(source), block_pieces([99, 0], [0, 2], 64)
        )

    def test_source_is_found_by_model_id(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(model_id=0, seed=100)
        source = peer.add_blocks(model_id=7, seed=300)
        cache = local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2, 7), cache, [1], [1])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([1], [1], 64))

    def test_last_registration_of_a_model_id_is_found(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(seed=100)
        source = peer.add_blocks(seed=300)
        cache = local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [1])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([1], [1], 64))

    def test_c85_sixty_one_layers_and_a_thousand_scattered_blocks(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(tensors=122, blocks=1500, block_bytes=128, seed=1000)
        cache = local.add_blocks(tensors=122, blocks=1500, block_bytes=128)
        dice = random.Random(11)
        src, dst = dice.sample(range(1500), 1200), dice.sample(range(1500), 1200)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces(src, dst, 128))

    def test_c85_two_hundred_and_forty_addresses(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(tensors=240, blocks=4, seed=1000)
        cache = local.add_blocks(tensors=240, blocks=4)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0, 2], [3, 1])
        assert local.dump(cache) == moved(
            before, peer.dump(source), block_pieces([0, 2], [3, 1], 64)
        )

    def test_large_runs_are_copied_whole(self, pair: Pair) -> None:
        """Neighbouring blocks become one run, larger than one kernel call takes."""
        local, peer = pair()
        source = peer.add_blocks(tensors=1, blocks=40, block_bytes=1 << 20, seed=5)
        cache = local.add_blocks(tensors=1, blocks=41, block_bytes=1 << 20)
        before = local.dump(cache)
        src, dst = list(range(40)), list(range(1, 41))
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert local.dump(cache) == moved(
            before, peer.dump(source), block_pieces(src, dst, 1 << 20)
        )


class TestBlocksToBlocksRefusals:
    def test_c44_unequal_list_lengths(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1, 2], [1])

    @pytest.mark.parametrize(("src", "dst"), [([16], [0]), ([0], [16]), ([2**63], [0])])
    def test_c44_index_out_of_range(self, pair: Pair, src: list[int], dst: list[int]) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks(seed=9)
        before = local.dump(cache)
        with refused(local.api, says="is outside [0, 16)"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)
        assert local.dump(cache) == before

    @pytest.mark.parametrize(("src", "dst"), [([-1], [0]), ([0], [-1]), (["0"], [0]), ([0.0], [0])])
    def test_c44_list_of_anything_else_is_a_type_error(
        self, pair: Pair, src: list[int], dst: list[int]
    ) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks()
        with pytest.raises(TypeError, match="only support"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, src, dst)

    def test_nothing_in_place_of_an_argument(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache, key = local.add_blocks(), local.api.BlocksCacheKey(2)
        destination = local.caches[cache]
        for arguments in (
            (None, destination, [0], [0]),
            (key, None, [0], [0]),
            (key, destination, None, [0]),
            (key, destination, [0], None),
        ):
            with pytest.raises(none_error(local.api)):
                local.manager.pull_blocks(*arguments)

    def test_c44_c46_empty_lists(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [], [])
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [], [1])

    def test_other_block_size(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(block_bytes=32)
        cache = local.add_blocks(block_bytes=64)
        with refused(local.api, says="destination 64, source has 32"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_c40_other_number_of_tensors(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(tensors=6)
        cache = local.add_blocks(tensors=4)
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_unknown_model_id(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks(model_id=1)
        cache = local.add_blocks()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(local.api.BlocksCacheKey(2, 2), cache, [0], [0])

    def test_c47_contiguous_destination(self, pair: Pair) -> None:
        local, _ = pair()
        cache = local.add_rows()
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_c42_local_faults_come_before_the_missing_link(
        self, make_local: Callable[..., Cluster]
    ) -> None:
        local = make_local()
        cache = local.add_blocks()
        key = local.api.BlocksCacheKey(2)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_blocks(key, cache, [0, 1], [99])  # the lists come after the link
        with refused(local.api):
            local.pull_blocks(key, cache, [0], [0], dst_layer_range=range(9))
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(1), cache, [0], [0])  # own cluster
        local.unregister(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(key, cache, [0], [0])


class TestRegistrationChanges:
    @refused_by_vendor(Restriction.REGISTER_FIRST)
    def test_cache_registered_after_the_link_is_found(self, pair: Pair) -> None:
        local, peer = pair()
        cache = local.add_blocks()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        source = peer.add_blocks(seed=100)
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))

    def test_unregistered_cache_is_not_read(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.unregister(source)
        before = local.dump(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [1])
        assert local.dump(cache) == before


class TestLayerRanges:
    def test_c38_layers_go_to_other_layers(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(tensors=8, seed=100), local.add_blocks(tensors=8)
        before, content = local.dump(cache), peer.dump(source)
        local.pull_blocks(
            local.api.BlocksCacheKey(2),
            cache,
            [1],
            [2],
            src_layer_range=range(2),
            dst_layer_range=range(2, 4),
        )
        after = moved(before[4:], content[:4], block_pieces([1], [2], 64))
        assert local.dump(cache) == before[:4] + after

    def test_c39_one_tensor_per_layer(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(tensors=3, seed=100), local.add_blocks(tensors=1)
        before, content = local.dump(cache), peer.dump(source)
        local.pull_blocks(
            local.api.BlocksCacheKey(2),
            cache,
            [1],
            [2],
            src_layer_range=range(2, 3),
            tensor_num_per_layer=1,
        )
        assert local.dump(cache) == moved(before, content[2:], block_pieces([1], [2], 64))

    @pytest.mark.parametrize(
        "options",
        [
            {"src_layer_range": range(3)},
            {"dst_layer_range": range(1, 3)},
            {"src_layer_range": range(1)},
            {"src_layer_range": range(0, 2, 2)},
            {"src_layer_range": range(1, 1)},
            {"src_layer_range": range(1), "tensor_num_per_layer": 3},
            {"tensor_num_per_layer": 0},
        ],
    )
    def test_c39_ranges_that_do_not_fit(self, pair: Pair, options: dict[str, object]) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0], **options)

    def test_c39_wrong_types(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache, key = local.add_blocks(), local.api.BlocksCacheKey(2)
        with pytest.raises(TypeError):
            local.pull_blocks(key, cache, [0], [0], src_layer_range=[0])
        with pytest.raises(TypeError):
            local.pull_blocks(key, cache, [0], [0], tensor_num_per_layer="2")
        with pytest.raises(ValueError):
            local.pull_blocks(key, cache, [0], [0], tensor_num_per_layer=-1)


class TestRowToBlocks:
    def test_c45_chunks_go_to_blocks_in_list_order(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=256, seed=100), local.add_blocks()
        before = local.dump(cache)
        key = local.api.CacheKeyByIdAndIndex(2, source, 2)
        local.pull_blocks(key, cache, [], [9, 3, 4, 0])
        pieces = [(512 + 64 * i, 64 * block, 64) for i, block in enumerate([9, 3, 4, 0])]
        assert local.dump(cache) == moved(before, peer.dump(source), pieces)

    def test_c45_last_chunk_of_a_row_is_partial(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=150, seed=100), local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source, 1), cache, [], [5, 6, 1])
        pieces = [(150, 320, 64), (214, 384, 64), (278, 64, 22)]
        assert local.dump(cache) == moved(before, peer.dump(source), pieces)

    def test_c45_short_list_takes_the_first_chunks_whole(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=150, seed=100), local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source), cache, [], [5, 7])
        pieces = [(0, 320, 64), (64, 448, 64)]
        assert local.dump(cache) == moved(before, peer.dump(source), pieces)

    def test_c45_row_by_request_key(self, pair: Pair) -> None:
        local, peer = pair()
        keys = [local.api.CacheKey(2, 11), local.api.CacheKey(2, 12)]
        source, cache = peer.add_rows(keys=keys, seed=100), local.add_blocks()
        before = local.dump(cache)
        local.pull_blocks(keys[1], cache, [], [1])
        assert local.dump(cache) == moved(before, peer.dump(source), [(256, 64, 64)])

    def test_list_longer_than_the_row(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(row_bytes=128), local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source), cache, [], [0, 1, 2])

    def test_c45_source_row_out_of_range(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(rows=4), local.add_blocks()
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source, 4), cache, [], [0])

    def test_c46_source_blocks_do_not_go_with_a_row(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_rows(), local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source), cache, [0], [0])

    def test_blocks_cache_by_id_is_refused(self, pair: Pair) -> None:
        local, peer = pair()
        source, cache = peer.add_blocks(), local.add_blocks()
        with refused(local.api):
            local.pull_blocks(local.api.CacheKeyByIdAndIndex(2, source), cache, [], [0])
