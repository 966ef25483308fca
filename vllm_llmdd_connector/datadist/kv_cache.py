"""``KvCache``: a cache of the first generation."""

from __future__ import annotations

from collections.abc import Callable

from vllm_llmdd_connector.datadist.checks import check, check_elements, check_type
from vllm_llmdd_connector.datadist.types import CacheDesc, Placement

__all__ = ["KvCache"]


class KvCache:
    """A cache in the engine's memory, made by ``KvCacheManager``, or a description of host memory.

    An allocated one is deallocated when it is garbage collected, unless that was done before.
    """

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        release: Callable[[KvCache], None] | None = None,
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._release = release

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Host memory for ``swap_blocks``: addresses of one device, or one list per device."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, list)
        check(cache_desc.placement == Placement.HOST, "a CPU cache needs placement HOST")
        check_elements("addrs", addrs, int, list)
        check(len({type(entry) is list for entry in addrs}) == 1, "addrs is empty or mixed")
        devices = [list(entry) for entry in addrs if isinstance(entry, list)]
        if not devices:
            devices = [[entry for entry in addrs if isinstance(entry, int)]]
        for device in devices:
            check_elements("addrs", device, int)
            check(
                len(device) == cache_desc.num_tensors,
                f"{len(device)} addresses for {cache_desc.num_tensors} tensors",
            )
        return cls(-1, cache_desc, devices)

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """One list of addresses for each device; empty after deallocation."""
        return self._per_device_tensor_addrs

    def forget_addrs(self) -> None:
        """The memory is no longer the holder's to use, nor to free."""
        self._per_device_tensor_addrs = []
        self._release = None

    def __del__(self) -> None:
        if getattr(self, "_release", None) is not None:
            assert self._release is not None
            self._release(self)

    def __repr__(self) -> str:
        return (
            f"KvCache(cache_id = {self._cache_id}, devices = {len(self._per_device_tensor_addrs)})"
        )
