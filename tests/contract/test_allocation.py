"""allocate_cache, deallocate_cache, remove_cache_key: memory, references, consumption of keys.

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from contract.cluster import Cluster, block_pieces, moved
from contract.errors import refused
from contract.peer import Peer

Local = Callable[..., Cluster]
Pair = Callable[..., tuple[Cluster, Peer]]

NONE = 2**64 - 1
PAGE = 4096
POOL = f'{{"memory_size": {64 * PAGE}, "page_shift": 12}}'


@pytest.fixture
def allocating_pair(pair: Pair) -> Callable[..., tuple[Cluster, Peer]]:
    """Like `pair`, with a memory pool of 64 pages on both sides; message mode."""
    return lambda **options: pair(**{"remote": False, "pool": POOL, **options})


def pulls(local: Cluster, key: Any, cache: int, **options: Any) -> bool:
    """Whether a pull by this key works; the only other outcome is that nothing is there."""
    try:
        local.pull_cache(key, cache, **options)
    except local.api.LLMException as error:
        if error.status_code.name == "LLM_KV_CACHE_NOT_EXIST":
            return False
        raise
    return True


class TestPool:
    def test_c23_ids_start_at_one_and_count_both_kinds(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        made = [local.allocate_rows(), local.add_rows(), local.allocate_blocks()]
        assert made == [1, 2, 3]

    def test_tensor_takes_whole_pages(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        cache = local.allocate_rows(tensors=3, rows=2, row_bytes=PAGE // 2 + 1)
        assert local.pool_used() == 6 * PAGE
        local.deallocate(cache)
        assert local.pool_used() == 0

    def test_pool_can_be_filled_to_the_last_page_again_and_again(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        for tensors in (1, 2, 4, 8, 16, 32, 64):
            caches = [
                local.allocate_rows(tensors=tensors, rows=1, row_bytes=PAGE)
                for _ in range(64 // tensors)
            ]
            assert local.pool_used() == 64 * PAGE
            with refused(local.api, "LLM_OUT_OF_MEMORY"):
                local.allocate_rows(tensors=1, rows=1, row_bytes=1)
            for cache in caches[::2] + caches[1::2]:
                local.deallocate(cache)
            assert local.pool_used() == 0
        local.allocate_rows(tensors=1, rows=1, row_bytes=64 * PAGE)

    def test_refused_allocation_keeps_no_memory(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        with refused(local.api, "LLM_OUT_OF_MEMORY"):
            local.allocate_rows(tensors=65, rows=1, row_bytes=PAGE)
        with refused(local.api):
            keys = [local.api.CacheKey(1, request) for request in range(5)]
            local.allocate_rows(keys=keys)
        assert local.pool_used() == 0
        assert not pulls_anything(local)

    def test_tensors_do_not_overlap(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        caches = [local.allocate_rows(row_bytes=PAGE, rows=2, seed=7 * i) for i in range(6)]
        assert local.pool_used() == 48 * PAGE
        contents = [local.dump(cache) for cache in caches]
        assert len({tensor for content in contents for tensor in content}) == 24

    def test_placement_chooses_the_pool(self, make_local: Local) -> None:
        local = make_local(pool=POOL, host_pool=POOL)
        local.allocate_rows(host=True)
        assert (local.pool_used(), local.pool_used(host=True)) == (0, 4 * PAGE)

    def test_without_a_pool_nothing_can_be_allocated(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.allocate_rows(host=True)

    def test_without_any_pool_nothing_can_be_deallocated(self, make_local: Local) -> None:
        local = make_local()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.allocate_blocks()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.deallocate(local.add_rows())
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.remove_key(local.api.CacheKey(1, 2))

    def test_arguments(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        api, manager = local.api, local.manager
        with refused(api):
            manager.allocate_cache(api.CacheDesc(0, [4, 8], api.DataType.DT_INT8))
        with refused(api):
            manager.allocate_blocks_cache(api.CacheDesc(0, [4, 8], api.DataType.DT_INT8))
        with refused(api):
            manager.allocate_cache(api.CacheDesc(1, [4, 0], api.DataType.DT_INT8))
        with pytest.raises(TypeError):
            manager.allocate_cache(None)
        with pytest.raises(TypeError):
            manager.allocate_cache(local._desc(1, 1, 1, False), [1])
        with pytest.raises(TypeError):
            manager.allocate_blocks_cache(local._desc(1, 1, 1, False), api.CacheKey(1, 2))
        with pytest.raises(TypeError):
            manager.remove_cache_key(api.BlocksCacheKey(1))

    def test_kind_of_deallocation_must_fit(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        rows, blocks = local.allocate_rows(), local.allocate_blocks()
        with refused(local.api):
            local.manager.deallocate_blocks_cache(local.caches[rows])
        with refused(local.api):
            local.manager.deallocate_cache(local.caches[blocks])

    def test_unregister_leaves_an_allocated_cache_alone(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        cache = local.allocate_rows()
        local.unregister(cache)
        local.manager.copy_cache(local.caches[cache], local.caches[cache], 1, 0)
        assert local.pool_used() == 4 * PAGE

    def test_finalize_frees_everything(self, make_local: Local) -> None:
        local = make_local(pool=f'{{"memory_size": {256 << 20}}}')
        before = local.resident_kib()
        local.allocate_rows(tensors=1, rows=1, row_bytes=128 << 20)
        assert local.resident_kib() > before + (100 << 10)
        local.finalize()
        assert local.resident_kib() < before + (64 << 10)


def pulls_anything(local: Cluster) -> bool:
    """Whether one of the keys 0 to 4 is bound here (removing it would free something)."""
    before = local.pool_used()
    for request in range(5):
        local.remove_key(local.api.CacheKey(1, request))
    return local.pool_used() != before


class TestKeys:
    def test_c24_row_i_is_bound_to_key_i(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey
        keys = [key(2, 10), key(2, NONE), key(2, 12)]  # the fourth row has none
        source, cache = peer.allocate_rows(keys=keys, seed=100), local.add_rows()
        content, before = peer.dump(source), local.dump(cache)
        assert pulls(local, key(2, 12), cache)
        assert local.dump(cache) == moved(before, content, [(512, 0, 256)])
        assert not pulls(local, key(2, 11), cache)

    def test_c24_placeholder_row_is_pulled_by_position(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        source = peer.allocate_rows(keys=[local.api.CacheKey(2, NONE)], seed=100)
        cache = local.add_rows()
        for row in (0, 1):
            content, before = peer.dump(source), local.dump(cache)
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source, row), cache)
            assert local.dump(cache) == moved(before, content, [(256 * row, 0, 256)])

    def test_c25_placeholders_repeat(self, allocating_pair: Pair) -> None:
        """Vendor: a second equal placeholder in one call ends in LLM_PARAM_INVALID, though its
        documentation shows several."""
        local, peer = allocating_pair()
        none = local.api.CacheKey(2, NONE)
        peer.allocate_rows(keys=[none, none, local.api.CacheKey(2, 7), none])
        assert pulls(local, local.api.CacheKey(2, 7), local.add_rows())

    def test_c26_key_is_bound_once(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 7)
        peer.allocate_rows(keys=[key])
        with refused(local.api):
            peer.allocate_rows(keys=[key])
        with refused(local.api):
            peer.allocate_rows(keys=[local.api.CacheKey(2, 8), local.api.CacheKey(2, 8)])
        assert peer.pool_used() == 4 * PAGE
        peer.remove_key(key)
        newer = peer.allocate_rows(keys=[key], seed=300)
        cache = local.add_rows()
        content = peer.dump(newer)
        assert pulls(local, key, cache)
        assert [tensor[:256] for tensor in local.dump(cache)] == [
            tensor[:256] for tensor in content
        ]

    def test_c26_equal_request_of_another_model_is_another_key(self, allocating_pair: Pair) -> None:
        """Vendor: inside one cache rows are found by req_id alone, so these two keys collide."""
        local, peer = allocating_pair()
        keys = [local.api.CacheKey(2, 7, 0), local.api.CacheKey(2, 7, 1)]
        source, cache = peer.allocate_rows(keys=keys, seed=100), local.add_rows()
        content, before = peer.dump(source), local.dump(cache)
        assert pulls(local, keys[1], cache)
        assert local.dump(cache) == moved(before, content, [(256, 0, 256)])
        assert not pulls(local, keys[1], cache)
        assert pulls(local, keys[0], cache)

    def test_c33_missing_key_and_second_deallocation(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        local.remove_key(local.api.CacheKey(1, 7))
        for cache in (local.allocate_rows(), local.allocate_blocks()):
            for _ in range(2):
                local.deallocate(cache)
            assert local.caches[cache].tensor_addrs == []
        assert local.pool_used() == 0


class TestReferences:
    def test_c27_keys_keep_a_deallocated_cache_until_the_last_pull(
        self, allocating_pair: Pair
    ) -> None:
        local, peer = allocating_pair()
        keys = [local.api.CacheKey(2, request) for request in (10, 11)]
        source, cache = peer.allocate_rows(keys=keys, seed=100), local.add_rows()
        content, before = peer.dump(source), local.dump(cache)
        peer.deallocate(source)
        assert pulls(local, keys[1], cache)
        assert local.dump(cache) == moved(before, content, [(256, 0, 256)])
        assert peer.pool_used() == 4 * PAGE
        assert pulls(local, keys[0], cache)
        assert peer.pool_used() == 0
        assert not pulls(local, local.api.CacheKeyByIdAndIndex(2, source), cache)

    def test_c27_removing_the_last_key_frees(self, make_local: Local) -> None:
        local = make_local(pool=POOL)
        keys = [local.api.CacheKey(1, 10), local.api.CacheKey(1, NONE, 0, 20)]
        local.deallocate(local.allocate_rows(keys=keys))
        local.remove_key(keys[0])
        assert local.pool_used() == 4 * PAGE
        local.remove_key(keys[1])
        assert local.pool_used() == 0

    def test_c27_keys_gone_first_and_the_id_last(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        source = peer.allocate_rows(keys=[key])
        assert pulls(local, key, local.add_rows())
        assert peer.pool_used() == 4 * PAGE
        peer.deallocate(source)
        assert peer.pool_used() == 0

    def test_deallocated_cache_is_no_destination(self, allocating_pair: Pair) -> None:
        """Its rows are kept for peers only."""
        local, peer = allocating_pair()
        source = peer.add_rows()
        cache = local.allocate_rows(keys=[local.api.CacheKey(1, 10)])
        local.deallocate(cache)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache)

    def test_c28_pull_by_key_consumes_it(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.add_rows()
        assert [pulls(local, key, cache) for _ in range(2)] == [True, False]

    def test_c28_pull_of_some_bytes_consumes_too(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.add_rows()
        local.pull_cache(key, cache, 0, 1)
        assert not pulls(local, key, cache)

    def test_c28_prefix_stays(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, NONE, 0, 20)
        peer.allocate_rows(keys=[key])
        cache = local.add_rows()
        assert all(pulls(local, key, cache) for _ in range(3))
        peer.remove_key(key)
        assert not pulls(local, key, cache)

    def test_c29_pull_by_position_consumes_the_rows_key(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        source, cache = peer.allocate_rows(keys=[key]), local.add_rows()
        assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source, 1), cache)  # has no key
        assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source, 0), cache)
        assert not pulls(local, key, cache)
        assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source, 0), cache)

    def test_refused_pull_consumes_nothing(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key], tensors=6)
        cache = local.add_rows(tensors=4)
        with refused(local.api):
            local.pull_cache(key, cache)  # another number of tensors
        assert pulls(local, key, cache, src_layer_range=range(2))

    def test_row_cut_into_blocks_consumes(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        source, cache = peer.allocate_rows(keys=[key], seed=100), local.add_blocks()
        content, before = peer.dump(source), local.dump(cache)
        local.pull_blocks(key, cache, [], [3, 1, 0, 2])
        pieces = [(64 * i, 64 * block, 64) for i, block in enumerate([3, 1, 0, 2])]
        assert local.dump(cache) == moved(before, content, pieces)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(key, cache, [], [3])

    def test_blocks_are_not_consumed_and_freed_with_their_key(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        source, cache = peer.allocate_blocks(seed=100), local.allocate_blocks()
        before, content = local.dump(cache), peer.dump(source)
        for _ in range(2):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [2])
        assert local.dump(cache) == moved(before, content, block_pieces([1], [2], 64))
        peer.deallocate(source)
        assert peer.pool_used() == 0
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [2])

    def test_remote_mode_consumes_nothing(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair(remote=True)
        source = peer.allocate_rows(keys=[local.api.CacheKey(2, 10)])
        cache = local.allocate_rows()
        for _ in range(2):
            assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source), cache)
        peer.deallocate(source)
        assert peer.pool_used() == 4 * PAGE
        peer.remove_key(local.api.CacheKey(2, 10))
        assert peer.pool_used() == 0

    def test_allocated_host_cache_is_accessible_in_remote_mode(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair(remote=True, host_pool=POOL)
        source, cache = peer.allocate_rows(host=True, seed=100), local.allocate_rows()
        assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source), cache)
        before = peer.dump(source)
        local.push_cache(local.api.CacheKeyByIdAndIndex(2, source, 3), cache, 1)
        assert peer.dump(source) == moved(before, local.dump(cache), [(256, 768, 256)])


class TestPartialPulls:
    HALVES = ({"src_layer_range": range(1)}, {"src_layer_range": range(1, 2)})

    def test_c31_key_goes_with_the_last_part(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 10)
        peer.allocate_rows(keys=[key])
        cache = local.add_rows(tensors=2)
        first, second = self.HALVES
        assert pulls(local, key, cache, **first)
        assert pulls(local, key, cache, **first)  # again the same half
        assert pulls(local, key, cache, **second)
        assert not pulls(local, key, cache, **first)

    def test_c31_every_key_counts_for_itself(self, allocating_pair: Pair) -> None:
        """Vendor: the tensors left to pull are kept per cache, so that the first half of one row
        and the second half of another use a key up."""
        local, peer = allocating_pair()
        keys = [local.api.CacheKey(2, 10), local.api.CacheKey(2, 11)]
        peer.allocate_rows(keys=keys)
        cache = local.add_rows(tensors=2)
        first, second = self.HALVES
        assert pulls(local, keys[0], cache, **first)
        assert pulls(local, keys[1], cache, **second)
        assert pulls(local, keys[0], cache, **second)
        assert not pulls(local, keys[0], cache, **first)
        assert pulls(local, keys[1], cache, **second)
        assert pulls(local, keys[1], cache, **first)
        assert not pulls(local, keys[1], cache, **first)


class TestRegisteredCaches:
    def test_more_keys_than_rows(self, make_local: Local) -> None:
        """Vendor: accepted, and a pull by a surplus key reads beyond the cache."""
        local = make_local()
        keys = [local.api.CacheKey(1, request) for request in range(5)]
        with refused(local.api):
            local.add_rows(rows=4, keys=keys)
        assert local.add_rows() == 2  # the refused call has used an id up

    def test_address_zero(self, make_local: Local) -> None:
        """Vendor: accepted unless it is remote accessible."""
        local = make_local()
        with refused(local.api):
            local.manager.register_blocks_cache(local._desc(1, 4, 8, False), [0], None, False)
        assert local.add_rows() == 2

    def test_removed_key_of_a_registered_row(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 7)
        peer.add_rows(keys=[key])
        cache = local.add_rows()
        assert all(pulls(local, key, cache) for _ in range(2))
        peer.remove_key(key)
        assert not pulls(local, key, cache)


def test_c87_many_cycles_leave_memory_where_it_was(allocating_pair: Pair) -> None:
    local, peer = allocating_pair()
    cache = local.allocate_rows()
    for request in range(300):
        key = local.api.CacheKey(2, request)
        source = peer.allocate_rows(keys=[key])
        peer.deallocate(source)
        assert pulls(local, key, cache)
    assert peer.pool_used() == 0
    assert local.pool_used() == 4 * PAGE
