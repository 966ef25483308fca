"""A cluster of the first generation, like `Cluster`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from contract.cluster import Cluster, choose_transport
from contract.engines import HOST_ENGINE, import_engine
from contract.memory import Tensor, Window, pattern


class FirstCluster(Cluster):
    """The same of the first generation: a PROMPT that listens or a DECODER."""

    def __init__(
        self,
        cluster_id: int,
        *,
        role: str,
        api: str = HOST_ENGINE,
        timeout_ms: int = 20000,
        may_switch: bool = False,
        memory: str = "",
    ) -> None:
        self.api = import_engine(api)
        self.pending_links = []
        config = self.api.LLMConfig()
        config.device_id = 0
        config.sync_kv_timeout = timeout_ms
        config.enable_switch_role = may_switch
        choose_transport(config)
        if memory:
            config.ge_options = {"ge.flowGraphMemMaxSize": memory}
        self.datadist = self.api.LLMDataDist(self.api.LLMRole[role], cluster_id)
        self._listen_port = self._init(config, listen=True)
        self.caches = {}
        self.tensors = {}

    @property
    def manager(self) -> Any:
        return self.datadist.kv_cache_manager

    def _fill(self, cache: Any, size: int, seed: int) -> int:
        memory = [Window(addr, size) for addr in cache.per_device_tensor_addrs[0]]
        for index, window in enumerate(memory):
            window.write(pattern(seed + index, size))
        return self._keep(cache, memory)

    def allocate_blocks(
        self,
        tensors: int = 4,
        blocks: int = 16,
        block_bytes: int = 64,
        *,
        model_id: int | None = None,
        seed: int = 0,
        host: bool = False,
    ) -> int:
        key = None
        if model_id is not None:
            key = self.api.BlocksCacheKey(self.datadist.cluster_id, model_id)
        desc = self._desc(tensors, blocks, block_bytes, host)
        cache = self.manager.allocate_blocks_cache(desc, key)
        return self._fill(cache, blocks * block_bytes, seed)

    def deallocate(self, cache_id: int) -> None:
        self.manager.deallocate_cache(self.caches[cache_id])

    def cpu_cache(
        self, tensors: int = 4, blocks: int = 16, block_bytes: int = 64, *, seed: int = 0
    ) -> tuple[Any, list[Tensor]]:
        memory = self._tensors(tensors, blocks * block_bytes, seed)
        desc = self._desc(tensors, blocks, block_bytes, True)
        return self.api.KvCache.create_cpu_cache(desc, [tensor.addr for tensor in memory]), memory

    def discard_caches(self, cache_ids: Sequence[int], keys: Sequence[Any]) -> None:
        for key in keys:
            self.manager.remove_cache_key(key)
        for cache_id in cache_ids:
            cache = self.caches.pop(cache_id, None)
            if cache is not None:
                self.manager.deallocate_cache(cache)
                del self.tensors[cache_id]
        assert self.pool_used() == 0, "the pool holds memory of the model's caches"

    def used_up_id(self) -> int:
        desc = self.api.CacheDesc(1, [1, 1], self.api.DataType.DT_INT8)
        cache = self.manager.allocate_cache(desc)
        self.manager.deallocate_cache(cache)
        return int(cache.cache_id)

    def unlink_from(self, cluster_id: int, port: int, *, force: bool = False) -> Any:
        """Named as it was linked, which this generation checks."""
        info = self._info(cluster_id, port)
        return self.datadist.unlink_clusters([info], 20000, force)[1][0]

    def drop(self, cache_id: int) -> None:
        """Let the cache object be collected."""
        del self.caches[cache_id], self.tensors[cache_id]
