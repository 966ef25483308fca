"""allocate_cache, deallocate_cache, remove_cache_key: memory, references, consumption of keys.

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

import pytest

from contract.cluster import Cluster
from contract.errors import refused
from contract.fixtures import MakeLocal

PAGE = 4096


POOL = f'{{"memory_size": {64 * PAGE}, "page_shift": 12}}'


class TestPool:
    def test_c23_ids_start_at_one_and_count_both_kinds(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        made = [local.allocate_rows(), local.add_rows(), local.allocate_blocks()]
        assert made == [1, 2, 3]

    def test_tensor_takes_whole_pages(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        cache = local.allocate_rows(tensors=3, rows=2, row_bytes=PAGE // 2 + 1)
        assert local.pool_used() == 6 * PAGE
        local.deallocate(cache)
        assert local.pool_used() == 0

    def test_pool_can_be_filled_to_the_last_page_again_and_again(
        self, make_local: MakeLocal
    ) -> None:
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

    def test_refused_allocation_keeps_no_memory(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        with refused(local.api, "LLM_OUT_OF_MEMORY"):
            local.allocate_rows(tensors=65, rows=1, row_bytes=PAGE)
        with refused(local.api):
            keys = [local.api.CacheKey(1, request) for request in range(5)]
            local.allocate_rows(keys=keys)
        assert local.pool_used() == 0
        assert not pulls_anything(local)

    def test_tensors_do_not_overlap(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        caches = [local.allocate_rows(row_bytes=PAGE, rows=2, seed=7 * i) for i in range(6)]
        assert local.pool_used() == 48 * PAGE
        contents = [local.dump(cache) for cache in caches]
        assert len({tensor for content in contents for tensor in content}) == 24

    def test_placement_chooses_the_pool(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL, host_pool=POOL)
        local.allocate_rows(host=True)
        assert (local.pool_used(), local.pool_used(host=True)) == (0, 4 * PAGE)

    def test_without_a_pool_nothing_can_be_allocated(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.allocate_rows(host=True)

    def test_without_any_pool_nothing_can_be_deallocated(self, make_local: MakeLocal) -> None:
        local = make_local()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.allocate_blocks()
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.deallocate(local.add_rows())
        with refused(local.api, "LLM_FEATURE_NOT_ENABLED"):
            local.remove_key(local.api.CacheKey(1, 2))

    def test_arguments(self, make_local: MakeLocal) -> None:
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

    def test_kind_of_deallocation_must_fit(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        rows, blocks = local.allocate_rows(), local.allocate_blocks()
        with refused(local.api):
            local.manager.deallocate_blocks_cache(local.caches[rows])
        with refused(local.api):
            local.manager.deallocate_cache(local.caches[blocks])

    def test_unregister_leaves_an_allocated_cache_alone(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        cache = local.allocate_rows()
        local.unregister(cache)
        local.manager.copy_cache(local.caches[cache], local.caches[cache], 1, 0)
        assert local.pool_used() == 4 * PAGE

    def test_finalize_frees_everything(self, make_local: MakeLocal) -> None:
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
