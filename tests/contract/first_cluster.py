"""A cluster of the first generation, like `Cluster`."""

from __future__ import annotations

from typing import Any

from contract.cluster import Cluster
from contract.engines import HOST_ENGINE, import_engine
from contract.memory import Window, pattern


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

    def unlink_force(self, cluster_id: int, port: int) -> Any:
        info = self._info(cluster_id, port)
        return self.datadist.unlink_clusters([info], 20000, True)[1][0]

    def drop(self, cache_id: int) -> None:
        """Let the cache object be collected."""
        del self.caches[cache_id], self.tensors[cache_id]
