"""``CacheManager`` and ``KvCacheManager`` of the stand-in for the vendor's package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fakes.strict_status import opaque, refuse
from fakes.strict_traffic import Traffic
from vllm_llmdd_connector import datadist as ours
from vllm_llmdd_connector.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    Placement,
)
from vllm_llmdd_connector.datadist.cache_manager import CacheManager as OurManager

__all__ = ["ALIGNMENT", "MAX_ADDRESSES", "CacheManager", "KvCacheManager"]

MAX_ADDRESSES = 240
ALIGNMENT = 2 << 20
_PULL_OPTIONS = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")
# Nothing but the sentence of a refusal differs.
_SAME = frozenset(
    {
        *("allocate_blocks_cache", "copy_blocks", "copy_cache", "deallocate_blocks_cache"),
        *("deallocate_cache", "remap_registered_memory", "remove_cache_key", "swap_blocks"),
        "set_is_call_linked",
    }
)
_FIRST_SAME = frozenset(
    {
        *("allocate_blocks_cache", "allocate_cache", "copy_blocks", "copy_cache"),
        *("get_cache_tensors", "pull_blocks", "pull_cache", "remove_cache_key", "swap_blocks"),
    }
)


def _not_none(*values: object) -> None:
    for value in values:
        if value is None:
            raise AttributeError("'NoneType' object has no attribute '_value'")


def _same(owner: object, inner: object, names: frozenset[str], name: str) -> Callable[..., Any]:
    if name not in names:
        raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")
    method = getattr(inner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with opaque(name):
            return method(*args, **kwargs)

    return call


class CacheManager:
    """Second generation."""

    check_cache_key = staticmethod(OurManager.check_cache_key)

    def __init__(self, inner: OurManager, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic
        self._addresses: dict[int, int] = {}  # cache id -> how many

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _same(self, self._inner, _SAME, name)

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        return self._register("register_cache", cache_desc, addrs, cache_keys, remote_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        return self._register(
            "register_blocks_cache", cache_desc, addrs, blocks_cache_key, remote_accessible
        )

    def _register(self, name: str, desc: CacheDesc, addrs: list[int], *rest: Any) -> Cache:
        _not_none(desc, addrs)
        self._traffic.check_unlinked()
        count = sum(self._addresses.values()) + len(addrs)
        misaligned = (
            isinstance(addrs, list)
            and all(isinstance(addr, int) for addr in addrs)
            and desc.placement == Placement.DEVICE
            and any(addr >= 0 and addr % ALIGNMENT for addr in addrs)
        )
        if count > MAX_ADDRESSES or misaligned:
            refuse(name, "LLM_FAILED")
        with opaque(name):
            cache: Cache = getattr(self._inner, name)(desc, addrs, *rest)
        self._addresses[cache.cache_id] = len(addrs)
        return cache

    def unregister_cache(self, cache_id: int) -> None:
        with opaque("unregister_cache"):
            self._inner.unregister_cache(cache_id)
        self._addresses.pop(cache_id, None)

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Equal keys in one call are refused, placeholders, too."""
        keys = [key for key in cache_keys if isinstance(key, CacheKey)]
        names = [(key.req_id, key.prefix_id, key.model_id) for key in keys]
        if len(set(names)) < len(names):
            refuse("allocate_cache")
        with opaque("allocate_cache"):
            return self._inner.allocate_cache(cache_desc, cache_keys)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        _not_none(cache_key, cache)
        options = {name: kwargs[name] for name in _PULL_OPTIONS if name in kwargs}
        with self._traffic.on_link("pull", cache_key.cluster_id), opaque("pull_cache"):
            self._inner.pull_cache(cache_key, cache, batch_index, size, **options)

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        _not_none(src_cache_key, dst_cache, src_blocks, dst_blocks)
        options = {name: kwargs[name] for name in _PULL_OPTIONS if name in kwargs}
        with self._traffic.on_link("pull", src_cache_key.cluster_id), opaque("pull_blocks"):
            self._inner.pull_blocks(src_cache_key, dst_cache, src_blocks, dst_blocks, **options)

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        _not_none(dst_cache_key, src_cache)
        with self._traffic.on_link("push", dst_cache_key.cluster_id, True), opaque("push_cache"):
            self._inner.push_cache(
                dst_cache_key,
                src_cache,
                src_batch_index,
                src_layer_range,
                dst_layer_range,
                size,
                tensor_num_per_layer,
            )

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        _not_none(dst_cache_key, src_cache, src_blocks, dst_blocks)
        with self._traffic.on_link("push", dst_cache_key.cluster_id, True), opaque("push_blocks"):
            self._inner.push_blocks(
                dst_cache_key,
                src_cache,
                src_blocks,
                dst_blocks,
                src_layer_range,
                dst_layer_range,
                tensor_num_per_layer,
            )

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[Any],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> ours.CacheTask:
        tasks: list[ours.CacheTask] = []

        def start() -> Callable[[], bool]:
            with opaque("transfer_cache_async"):
                task = self._inner.transfer_cache_async(
                    src_cache,
                    layer_synchronizer,
                    transfer_configs,
                    src_block_indices,
                    dst_block_indices,
                    dst_block_memory_size,
                )
            tasks.append(task)
            return lambda: task._task.wait(0)

        clusters = [getattr(config, "dst_cluster_id", 0) for config in transfer_configs or ()]
        self._traffic.transfer("transfer_cache_async", clusters, start)
        return tasks[0]


class KvCacheManager:
    """First generation: one call at a time, and giving a cache up twice is an error."""

    def __init__(self, inner: ours.KvCacheManager, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = _same(self, self._inner, _FIRST_SAME, name)

        def alone(*args: Any, **kwargs: Any) -> Any:
            with self._traffic.alone(name):
                return call(*args, **kwargs)

        return alone

    def is_initialized(self) -> bool:
        return self._inner.is_initialized()

    def deallocate_cache(self, cache: ours.KvCache) -> None:
        with self._traffic.alone("deallocate_cache"), opaque("deallocate_cache"):
            if isinstance(cache, ours.KvCache) and not cache.per_device_tensor_addrs:
                refuse("deallocate_cache", "LLM_KV_CACHE_NOT_EXIST")
            self._inner.deallocate_cache(cache)

    def transfer_cache_async(
        self,
        src_cache: ours.KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[ours.TransferConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> ours.CacheTask:
        with self._traffic.alone("transfer_cache_async"), opaque("transfer_cache_async"):
            return self._inner.transfer_cache_async(
                src_cache,
                layer_synchronizer,
                transfer_configs,
                src_block_indices,
                dst_block_indices,
                dst_block_memory_size,
            )
