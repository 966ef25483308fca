"""``KvCacheManager``: caches in the engine's memory, first generation of the API.

A PROMPT process allocates rows with keys, and a DECODER process pulls them. Roles are enforced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.cache_task import CacheTask
from vllm_llmdd_connector.datadist.checks import (
    UINT64_MASK,
    block_array,
    check,
    check_elements,
    check_int64,
    check_type,
)
from vllm_llmdd_connector.datadist.keys import (
    INVALID_ID,
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from vllm_llmdd_connector.datadist.kv_cache import KvCache
from vllm_llmdd_connector.datadist.layer_transfer import start_transfer
from vllm_llmdd_connector.datadist.link_use import LinkUse
from vllm_llmdd_connector.datadist.refs import (
    KeyFields,
    check_copied_row,
    check_row,
    copy_pairs,
    key_fields,
    layer_options,
    model_id_of,
    ref_of,
    swap_pairs,
)
from vllm_llmdd_connector.datadist.status import (
    LLMException,
    first_generation_errors,
    first_generation_status,
)
from vllm_llmdd_connector.datadist.transfer_config import LayerSynchronizer, TransferConfig
from vllm_llmdd_connector.datadist.types import CacheDesc, LLMRole, Placement

if TYPE_CHECKING:
    from vllm_llmdd_connector.datadist.tensor import Tensor

__all__ = ["KvCacheManager"]

_PULL_OPTIONS = frozenset({"src_cache_offset", "dst_cache_offset"})
_NO_KEY = (INVALID_ID, INVALID_ID, 0)


class KvCacheManager:
    """Made by ``LLMDataDist``; its methods raise ``LLMException`` once that is finalized."""

    def __init__(self, engine: _engine.HostEngine, role: LLMRole, link_use: LinkUse) -> None:
        self._engine = engine
        self._role = role
        self._link_use = link_use
        self._closed = False

    def close(self) -> None:
        self._closed = True

    def switch_role(self, role: LLMRole) -> None:
        self._role = role

    def is_initialized(self) -> bool:
        return not self._closed

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> KvCache:
        """Allocate a contiguous cache; key i names batch row i (PROMPT only).

        Of equal keys the last one counts. The memory lives until the cache is deallocated and each
        key is used up: by ``remove_cache_key`` or by the first complete pull without offsets.
        """
        self._require_open()
        _check_desc(cache_desc)
        check_type("cache_keys", cache_keys, list, tuple)
        check_elements("cache_keys", cache_keys, CacheKey)
        check(not cache_keys or self._role == LLMRole.PROMPT, "cache_keys are for PROMPT only")
        with first_generation_errors("allocate_cache"):
            cache_id, addrs = self._engine.allocate_cache(*_spec(cache_desc), _last_of(cache_keys))
        return KvCache(cache_id, cache_desc, [addrs], self._collect)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None
    ) -> KvCache:
        """Allocate a cache whose first dimension counts blocks. A DECODER's has no key."""
        self._require_open()
        _check_desc(cache_desc)
        model_id = model_id_of(blocks_cache_key)
        is_named_by_decoder = model_id is not None and self._role == LLMRole.DECODER
        check(not is_named_by_decoder, "a DECODER's blocks cache has no key")
        with first_generation_errors("allocate_blocks_cache"):
            cache_id, addrs = self._engine.allocate_blocks_cache(*_spec(cache_desc), model_id)
        return KvCache(cache_id, cache_desc, [addrs], self._collect)

    def deallocate_cache(self, cache: KvCache) -> None:
        """Give a cache of either kind up. Twice is no error."""
        self._require_open()
        check_type("cache", cache, KvCache)
        with first_generation_errors("deallocate_cache"):
            self._engine.deallocate_cache(cache.cache_id)
        cache.forget_addrs()

    def _collect(self, cache: KvCache) -> None:
        """The finalizer of a cache. In a forked child the engine refuses, rightly."""
        if not self._closed:
            with contextlib.suppress(LLMException):
                self.deallocate_cache(cache)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key (PROMPT only). A missing key is no error."""
        self._require_role(LLMRole.PROMPT)
        check_type("cache_key", cache_key, CacheKey)
        with first_generation_errors("remove_cache_key"):
            self._engine.remove_cache_key(key_fields(cache_key))

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a peer's row into row ``batch_index`` (DECODER only).

        Options: ``src_layer_range``, ``dst_layer_range``, ``tensor_num_per_layer=2``, and
        ``src_cache_offset``, ``dst_cache_offset`` in bytes; either offset, even 0, keeps the key.
        ``size`` -1 copies what is left of the local row behind its offset.
        """
        self._require_role(LLMRole.DECODER)
        check_type("cache_key", cache_key, CacheKey, CacheKeyByIdAndIndex)
        _check_device("kv_cache", kv_cache)
        check_row(batch_index, size)
        offsets = _offset(kwargs, "src_cache_offset"), _offset(kwargs, "dst_cache_offset")
        ref = ref_of(cache_key)
        layers = layer_options(
            {name: value for name, value in kwargs.items() if name not in _PULL_OPTIONS}
        )
        with (
            self._link_use.transfer(cache_key.cluster_id),
            first_generation_errors("pull_cache"),
        ):
            self._engine.pull_cache(
                cache_key.cluster_id, ref, kv_cache.cache_id, batch_index, size, *layers, *offsets
            )

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: Sequence[int],
        decoder_blocks: Sequence[int],
        **kwargs: Any,
    ) -> None:
        """Copy a peer's blocks ``prompt_blocks[i]`` into ``decoder_blocks[i]`` (DECODER only)."""
        self._require_role(LLMRole.DECODER)
        check_type("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        _check_device("decoder_kv_cache", decoder_kv_cache)
        src = block_array("prompt_blocks", prompt_blocks)
        dst = block_array("decoder_blocks", decoder_blocks)
        check(len(src) > 0 and len(dst) > 0, "a list of blocks is empty")
        check(len(src) == len(dst), f"{len(src)} prompt blocks for {len(dst)} decoder blocks")
        layers = layer_options(kwargs)
        cluster_id = prompt_cache_key.cluster_id & UINT64_MASK
        with self._link_use.transfer(cluster_id), first_generation_errors("pull_blocks"):
            self._engine.pull_blocks(
                cluster_id, ref_of(prompt_cache_key), decoder_kv_cache.cache_id, src, dst, *layers
            )

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[TransferConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
        *,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Push layer after layer, each when ``layer_synchronizer`` says that it is computed (PROMPT
        only). Rows go to rows, blocks to blocks; see ``CacheManager.transfer_cache_async``."""
        self._require_role(LLMRole.PROMPT)
        check_type("src_cache", src_cache, KvCache)
        with first_generation_errors("transfer_cache_async"):
            task = start_transfer(
                self._engine,
                src_cache,
                layer_synchronizer,
                transfer_configs,
                src_block_indices,
                dst_block_indices,
                dst_block_memory_size,
                tensor_num_per_layer,
                by_key=False,
                rows_to_blocks=False,
            )
            self._link_use.add_task((config.dst_cluster_id for config in transfer_configs), task)
        return CacheTask(task, first_generation_status)

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes [offset, offset + size) of a row to the same place of another row."""
        self._require_open()
        _check_device("dst", dst)
        _check_device("src", src)
        check_copied_row(dst_batch_index, src_batch_index, offset, size, req_id)
        with first_generation_errors("copy_cache"):
            self._engine.copy_row(
                dst.cache_id, src.cache_id, dst_batch_index, src_batch_index, offset, size
            )

    def copy_blocks(self, cache: KvCache, copy_block_info: Mapping[int, Sequence[int]]) -> None:
        """Copy each block to all blocks of its list, in the order of the mapping."""
        self._require_open()
        _check_device("cache", cache)
        src, dst = copy_pairs(copy_block_info)
        with first_generation_errors("copy_blocks"):
            self._engine.copy_blocks(cache.cache_id, src, dst)

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """One tensor of the cache on each device, as memory that must not outlive the cache."""
        from vllm_llmdd_connector.datadist.tensor import Tensor, TensorDesc

        self._require_open()
        _check_device("cache", cache)
        check_type("tensor_index", tensor_index, int)
        desc = cache.cache_desc
        check(
            0 <= tensor_index < desc.num_tensors,
            f"tensor_index {tensor_index} is outside [0, {desc.num_tensors})",
        )
        shape = TensorDesc(desc.data_type, desc.shape)
        return [Tensor(addrs[tensor_index], shape) for addrs in cache.per_device_tensor_addrs]

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: Mapping[int, int]) -> None:
        """Copy blocks from host to device memory or back, ``{source block: destination block}``."""
        self._require_open()
        check_type("src", src, KvCache)
        check_type("dst", dst, KvCache)
        src_blocks, dst_blocks = swap_pairs(src.cache_desc, dst.cache_desc, src_to_dst)
        with first_generation_errors("swap_blocks"):
            self._engine.move_blocks(_local(src), _local(dst), src_blocks, dst_blocks)

    def _require_open(self) -> None:
        check(not self._closed, "the LLMDataDist of this KvCacheManager is finalized")

    def _require_role(self, role: LLMRole) -> None:
        self._require_open()
        check(self._role == role, f"only a {role.name} may call this, not a {self._role.name}")


def _check_desc(cache_desc: CacheDesc) -> None:
    check_type("cache_desc", cache_desc, CacheDesc)
    check(cache_desc.num_tensors > 0, "num_tensors must be above 0")
    check(cache_desc.placement == Placement.DEVICE, "only DEVICE caches can be allocated")


def _check_device(name: str, cache: KvCache) -> None:
    check_type(name, cache, KvCache)
    check(cache.cache_desc.placement == Placement.DEVICE, f"{name} is not a DEVICE cache")


def _spec(cache_desc: CacheDesc) -> tuple[list[int], int, bool, bool, int]:
    return (
        cache_desc.shape,
        cache_desc.data_type.num_bytes,
        True,
        False,
        cache_desc.num_tensors,
    )


def _last_of(keys: Sequence[CacheKey]) -> list[KeyFields]:
    """Rows whose key is given again further on become rows without a key."""
    last = {_identity(key): row for row, key in enumerate(keys)}
    return [
        key_fields(key) if last[_identity(key)] == row else _NO_KEY for row, key in enumerate(keys)
    ]


def _identity(key: CacheKey) -> tuple[bool, int, int]:
    is_prefix = key.prefix_id != INVALID_ID
    return is_prefix, key.prefix_id if is_prefix else key.req_id, key.model_id


def _offset(options: Mapping[str, Any], name: str) -> int | None:
    offset = options.get(name)
    if offset is None:
        return None
    check_int64(name, offset)
    if offset < 0:
        raise ValueError(f"{name} value is out of range [0, {2**63 - 1}]: {offset}")
    return int(offset)


def _local(cache: KvCache) -> tuple[int, list[int], int, list[int]]:
    desc = cache.cache_desc
    devices = cache.per_device_tensor_addrs
    check(len(devices) <= 1, f"the cache has addresses for {len(devices)} devices, not for one")
    addrs = devices[0] if devices else []
    return cache.cache_id, desc.shape, desc.data_type.num_bytes, addrs
