"""Keys of allocated and registered rows: binding, references, consumption by pulls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from contract.actions import pulls
from contract.cluster import Cluster
from contract.engines import is_vendor, message_mode, remote_mode
from contract.errors import refused
from contract.fixtures import MakeLocal, Pair
from contract.layerwise import recorder
from contract.memory import block_pieces, moved
from contract.peer import Peer

NONE = 2**64 - 1


PAGE = 4096


POOL = f'{{"memory_size": {64 * PAGE}, "page_shift": 12}}'


@pytest.fixture
def allocating_pair(pair: Pair) -> Callable[..., tuple[Cluster, Peer]]:
    """Like `pair`, with a memory pool of 64 pages on both sides."""
    return lambda **options: pair(**{"pool": POOL, **options})


@message_mode
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
        keys = [none, none, local.api.CacheKey(2, 7), none]
        if is_vendor(local.api):
            with refused(local.api):
                peer.allocate_rows(keys=keys)
            return
        peer.allocate_rows(keys=keys)
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


@message_mode
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

    def test_deallocated_cache_is_no_raw_destination(self, allocating_pair: Pair) -> None:
        """Peers still read its rows, so nobody may change them."""
        local, peer = allocating_pair()
        source = local.add_rows()
        theirs = peer.allocate_rows(keys=[local.api.CacheKey(2, 10)])
        config = local.api.TransferConfig(2, peer.addrs(theirs))
        results = []
        for _ in range(2):
            task = local.transfer(recorder(local.api), source, [config])
            results.append(task.synchronize().name)
            peer.deallocate(theirs)
        assert results == ["LLM_SUCCESS", "LLM_PARAM_INVALID"]

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


@remote_mode
class TestRemoteMode:
    def test_remote_mode_consumes_nothing(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        source = peer.allocate_rows(keys=[local.api.CacheKey(2, 10)])
        cache = local.allocate_rows()
        for _ in range(2):
            assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source), cache)
        peer.deallocate(source)
        assert peer.pool_used() == 4 * PAGE
        peer.remove_key(local.api.CacheKey(2, 10))
        assert peer.pool_used() == 0

    def test_allocated_host_cache_is_accessible_in_remote_mode(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair(host_pool=POOL)
        source, cache = peer.allocate_rows(host=True, seed=100), local.allocate_rows()
        assert pulls(local, local.api.CacheKeyByIdAndIndex(2, source), cache)
        before = peer.dump(source)
        local.push_cache(local.api.CacheKeyByIdAndIndex(2, source, 3), cache, 1)
        assert peer.dump(source) == moved(before, local.dump(cache), [(256, 768, 256)])


@message_mode
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


class TestOneProcess:
    def test_more_keys_than_rows(self, make_local: MakeLocal) -> None:
        """Vendor: accepted, and a pull by a surplus key reads beyond the cache."""
        local = make_local()
        keys = [local.api.CacheKey(1, request) for request in range(5)]
        with refused(local.api):
            local.add_rows(rows=4, keys=keys)
        assert local.add_rows() == 2  # the refused call has used an id up

    def test_address_zero(self, make_local: MakeLocal) -> None:
        """Vendor: accepted unless it is remote accessible."""
        local = make_local()
        with refused(local.api):
            local.manager.register_blocks_cache(local._desc(1, 4, 8, False), [0], None, False)
        assert local.add_rows() == 2

    @message_mode
    def test_removed_key_of_a_registered_row(self, allocating_pair: Pair) -> None:
        local, peer = allocating_pair()
        key = local.api.CacheKey(2, 7)
        peer.add_rows(keys=[key])
        cache = local.add_rows()
        assert all(pulls(local, key, cache) for _ in range(2))
        peer.remove_key(key)
        assert not pulls(local, key, cache)

    def test_c33_missing_key_and_second_deallocation(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        local.remove_key(local.api.CacheKey(1, 7))
        for cache in (local.allocate_rows(), local.allocate_blocks()):
            for _ in range(2):
                local.deallocate(cache)
            assert local.caches[cache].tensor_addrs == []
        assert local.pool_used() == 0

    def test_c27_removing_the_last_key_frees(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        keys = [local.api.CacheKey(1, 10), local.api.CacheKey(1, NONE, 0, 20)]
        local.deallocate(local.allocate_rows(keys=keys))
        local.remove_key(keys[0])
        assert local.pool_used() == 4 * PAGE
        local.remove_key(keys[1])
        assert local.pool_used() == 0


@message_mode
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
