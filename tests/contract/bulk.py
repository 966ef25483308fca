"""Several steps of a `Cluster` in one call: model tests ask a helper process thousands of times."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class BulkMethods(ABC):
    caches: dict[int, Any]
    tensors: dict[int, Any]
    datadist: Any
    manager: Any
    api: Any

    @abstractmethod
    def dump(self, cache_id: int) -> list[bytes]: ...

    @abstractmethod
    def pool_used(self, *, host: bool = False) -> int: ...

    @abstractmethod
    def link_members(self, name: str, members: dict[int, int]) -> int: ...

    def discard_caches(self, cache_ids: Sequence[int], keys: Sequence[Any]) -> None:
        """Unbind these keys, and unregister or deallocate these caches, if they still exist."""
        for key in keys:
            self.manager.remove_cache_key(key)
        for cache_id in cache_ids:
            cache = self.caches.pop(cache_id, None)
            if cache is None:
                continue
            self.manager.unregister_cache(cache_id)
            if cache.is_blocks_cache:
                self.manager.deallocate_blocks_cache(cache)
            else:
                self.manager.deallocate_cache(cache)
            del self.tensors[cache_id]
        assert self.pool_used() == 0, "the pool holds memory of the model's caches"

    def reserve(self, cache_id: int, blocks: Sequence[int]) -> int:
        """`open_reservation`, also of a cache whose creation was refused."""
        cache = self.caches.get(cache_id)
        if cache is None:
            desc = self.api.CacheDesc(1, [1, 1], self.api.DataType.DT_INT8)
            cache = self.api.Cache(cache_id, desc, [1], True)
        return int(self.manager.open_reservation(cache, blocks))

    def contents(self, cache_ids: Sequence[int]) -> tuple[list[list[bytes]], int]:
        """The bytes of these caches, and what the pool holds."""
        return [self.dump(cache_id) for cache_id in cache_ids], self.pool_used()

    def link_all(self, comms: Sequence[tuple[str, dict[int, int]]]) -> list[int]:
        return [self.link_members(name, members) for name, members in comms]

    def unlink_all(self, comm_ids: Sequence[int]) -> None:
        for comm_id in comm_ids:
            self.datadist.unlink(comm_id)

    def used_up_id(self) -> int:
        """A cache id; the next ones follow it."""
        key = self.api.BlocksCacheKey(self.datadist.cluster_id, 2**32)
        desc = self.api.CacheDesc(1, [1, 1], self.api.DataType.DT_INT8)
        cache = self.manager.register_blocks_cache(desc, [1], key)
        self.manager.unregister_cache(cache.cache_id)
        return int(cache.cache_id)
