"""Caches in the engine's own memory, and copies inside the process.

The vendor calls these methods deprecated: registered memory serves new programs. They need a memory
pool (``LLMConfig.mem_pool_cfg`` for DEVICE, ``host_mem_pool_cfg`` for HOST); every tensor takes
whole pages of ``2 ** page_shift`` bytes of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.checks import (
    check,
    check_elements,
    check_type,
)
from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKey
from vllm_llmdd_connector.datadist.refs import (
    check_copied_row,
    copy_pairs,
    key_fields,
    model_id_of,
    swap_pairs,
)
from vllm_llmdd_connector.datadist.status import engine_errors
from vllm_llmdd_connector.datadist.types import Cache, CacheDesc, MemInfo, Memtype, Placement

__all__ = ["CacheAllocation"]


class CacheAllocation(ABC):
    """These methods of ``CacheManager``."""

    _engine: _engine.HostEngine

    @abstractmethod
    def _require_open(self) -> None:
        """Refuse the call once the owner is finalized."""

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate a contiguous cache; key i names batch row i.

        The cache lives until it is deallocated and each of its keys is used up: by
        ``remove_cache_key``, or by the first complete pull of its row (message mode only, and never
        for a prefix). Raises ``LLM_OUT_OF_MEMORY`` when the pool is full.
        """
        self._require_open()
        _check_desc(cache_desc)
        check_type("cache_keys", cache_keys, list, tuple)
        check_elements("cache_keys", cache_keys, CacheKey)
        with engine_errors("allocate_cache"):
            cache_id, addrs = self._engine.allocate_cache(
                *_spec(cache_desc), [key_fields(key) for key in cache_keys]
            )
        return Cache(cache_id, cache_desc, addrs, False)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> Cache:
        """Allocate a cache whose first dimension counts blocks."""
        self._require_open()
        _check_desc(cache_desc)
        model_id = model_id_of(blocks_cache_key)
        with engine_errors("allocate_blocks_cache"):
            cache_id, addrs = self._engine.allocate_blocks_cache(*_spec(cache_desc), model_id)
        return Cache(cache_id, cache_desc, addrs, True)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give a contiguous cache up; rows with keys stay for peers. Twice is no error."""
        self._require_open()
        check_type("cache", cache, Cache)
        check(not cache.is_blocks_cache, "use deallocate_blocks_cache for a blocks cache")
        self._deallocate("deallocate_cache", cache)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Free a blocks cache at once, with its key. Twice is no error."""
        self._require_open()
        check_type("cache", cache, Cache)
        check(cache.is_blocks_cache, "use deallocate_cache for a contiguous cache")
        self._deallocate("deallocate_blocks_cache", cache)

    def _deallocate(self, tag: str, cache: Cache) -> None:
        with engine_errors(tag):
            self._engine.deallocate_cache(cache.cache_id)
        cache.forget_addrs()

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key. A missing key is no error."""
        self._require_open()
        check_type("cache_key", cache_key, CacheKey)
        with engine_errors("remove_cache_key"):
            self._engine.remove_cache_key(key_fields(cache_key))

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes [offset, offset + size) of a row to the same place of another row.

        ``size`` -1 copies the rest of the source row; ``req_id`` has no effect.
        """
        self._require_open()
        for name, cache in (("dst", dst), ("src", src)):
            check_type(name, cache, Cache)
            check(not cache.is_blocks_cache, f"copy_cache: {name} is a blocks cache")
        check_copied_row(dst_batch_index, src_batch_index, offset, size, req_id)
        with engine_errors("copy_cache"):
            self._engine.copy_row(
                dst.cache_id, src.cache_id, dst_batch_index, src_batch_index, offset, size
            )

    def copy_blocks(self, cache: Cache, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copy each block to all blocks of its list, in the order of the mapping."""
        self._require_open()
        check_type("cache", cache, Cache)
        check(cache.is_blocks_cache, "copy_blocks needs a blocks cache")
        src, dst = copy_pairs(copy_block_info)
        with engine_errors("copy_blocks"):
            self._engine.copy_blocks(cache.cache_id, src, dst)

    def swap_blocks(
        self, src_cache: Cache, dst_cache: Cache, src_to_dst: Mapping[int, int]
    ) -> None:
        """Copy blocks from host to device memory or back, ``{source block: destination block}``."""
        self._require_open()
        for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
            check_type(name, cache, Cache)
            check(cache.is_blocks_cache, f"swap_blocks: {name} is not a blocks cache")
        src, dst = swap_pairs(src_cache.cache_desc, dst_cache.cache_desc, src_to_dst)
        with engine_errors("swap_blocks"):
            self._engine.move_blocks(_local(src_cache), _local(dst_cache), src, dst)

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Checked, and without effect: the vendor uses it after device memory errors."""
        self._require_open()
        infos: Sequence[Any] = mem_infos if isinstance(mem_infos, list) else [mem_infos]
        check(len(infos) > 0, "mem_infos is empty")
        for info in infos:
            check(isinstance(info, MemInfo), f"mem_infos only support MemInfo, got {type(info)}")
            check(info.mem_type == Memtype.MEM_TYPE_DEVICE, "only device memory can be remapped")
            check(info.addr != 0 and info.size > 0, "a piece of memory has no address or no size")


def _check_desc(cache_desc: CacheDesc) -> None:
    check_type("cache_desc", cache_desc, CacheDesc)
    check(cache_desc.num_tensors > 0, "num_tensors must be above 0")


def _spec(cache_desc: CacheDesc) -> tuple[list[int], int, bool, bool, int]:
    """Peers may always access the pool, whatever its placement."""
    return (
        cache_desc.shape,
        cache_desc.data_type.num_bytes,
        True,
        cache_desc.placement == Placement.HOST,
        cache_desc.num_tensors,
    )


def _local(cache: Cache) -> tuple[int, list[int], int, list[int]]:
    desc = cache.cache_desc
    return cache.cache_id, desc.shape, desc.data_type.num_bytes, cache.tensor_addrs
