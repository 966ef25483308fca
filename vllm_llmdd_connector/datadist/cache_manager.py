"""``CacheManager``: registration of memory, pulls and pushes (second generation of the API).

What it allocates by itself, and copies inside the process, are in ``cache_allocation``.

Pulls and pushes block their caller, without the GIL, for at most ``sync_kv_timeout``. Memory stays
the caller's: it must stay mapped until ``unregister_cache`` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.cache_allocation import CacheAllocation
from vllm_llmdd_connector.datadist.cache_task import CacheTask
from vllm_llmdd_connector.datadist.checks import (
    UINT64_MASK,
    block_array,
    check,
    check_elements,
    check_int64,
    check_range,
    check_token,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from vllm_llmdd_connector.datadist.layer_transfer import AnyConfig, start_transfer
from vllm_llmdd_connector.datadist.refs import (
    AnyKey,
    LayerOptions,
    check_cache_key,
    check_per_layer,
    check_row,
    key_fields,
    layer_options,
    model_id_of,
    ref_of,
)
from vllm_llmdd_connector.datadist.status import engine_errors, fail
from vllm_llmdd_connector.datadist.transfer_config import LayerSynchronizer
from vllm_llmdd_connector.datadist.types import Cache, CacheDesc, Placement

__all__ = ["CacheManager"]


class CacheManager(CacheAllocation):
    """Made by ``LLMDataDist``; its methods raise ``LLMException`` once that is finalized."""

    def __init__(self, engine: _engine.HostEngine, remote_access: bool) -> None:
        self._engine = engine
        self._remote_access = remote_access
        self._closed = False
        self._called_link = False

    def close(self) -> None:
        self._closed = True

    def set_is_call_linked(self) -> None:
        """``link`` was called: what is registered from now on is not remote accessible."""
        self._called_link = True

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register contiguous tensors at ``addrs``; key i names batch row i."""
        self._require_open()
        self._check_memory(cache_desc, addrs, remote_accessible)
        check_type("cache_keys", cache_keys, list, tuple)
        check_elements("cache_keys", cache_keys, CacheKey)
        check(
            len(addrs) == cache_desc.num_tensors,
            f"{len(addrs)} addresses for {cache_desc.num_tensors} tensors",
        )
        check(0 not in addrs, "an address is 0")
        with engine_errors("register_cache"):
            cache_id = self._engine.register_cache(
                cache_desc.shape,
                cache_desc.data_type.num_bytes,
                self._accessible(cache_desc, remote_accessible),
                cache_desc.placement == Placement.HOST,
                addrs,
                [key_fields(key) for key in cache_keys],
            )
        return Cache(cache_id, cache_desc, list(addrs), False)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Register tensors whose first dimension counts blocks. A key's model_id names them; the
        last registration of a model_id is the one that is found."""
        self._require_open()
        self._check_memory(cache_desc, addrs, remote_accessible)
        model_id = model_id_of(blocks_cache_key)
        with engine_errors("register_blocks_cache"):
            if len(addrs) != cache_desc.num_tensors:
                fail(f"{len(addrs)} addresses for {cache_desc.num_tensors} tensors")
            cache_id = self._engine.register_blocks_cache(
                cache_desc.shape,
                cache_desc.data_type.num_bytes,
                self._accessible(cache_desc, remote_accessible),
                cache_desc.placement == Placement.HOST,
                addrs,
                model_id,
            )
        return Cache(cache_id, cache_desc, list(addrs), True)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a cache; an unknown id is no error. Afterwards the engine neither reads nor writes
        its memory: copies into it are stopped, and peers find it no more."""
        self._require_open()
        check_int64("cache_id", cache_id)
        with engine_errors("unregister_cache"):
            self._engine.unregister_cache(cache_id)

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a peer's row into row ``batch_index``; ``size`` -1 copies the local row's bytes.

        Options: ``src_layer_range``, ``dst_layer_range``, ``tensor_num_per_layer=2``.
        """
        self._require_open()
        if self._remote_access:
            check_type("cache_key", cache_key, CacheKeyByIdAndIndex)
        check_type("cache_key", cache_key, CacheKey, CacheKeyByIdAndIndex)
        check_type("cache", cache, Cache)
        check(not cache.is_blocks_cache, "pull_cache needs a contiguous cache, use pull_blocks")
        check_row(batch_index, size)
        ref = ref_of(cache_key)
        layers = layer_options(kwargs)
        with engine_errors("pull_cache"):
            self._engine.pull_cache(
                cache_key.cluster_id, ref, cache.cache_id, batch_index, size, *layers
            )

    def pull_blocks(
        self,
        src_cache_key: AnyKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """Copy a peer's blocks ``src_blocks[i]`` into ``dst_blocks[i]``.

        With a ``CacheKey`` or ``CacheKeyByIdAndIndex`` the peer's row is cut into chunks of one
        block; chunk i goes to ``dst_blocks[i]`` and ``src_blocks`` stays empty. Options as for
        ``pull_cache``.
        """
        self._require_open()
        check_type("src_cache_key", src_cache_key, CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey)
        check_type("dst_cache", dst_cache, Cache)
        check(dst_cache.is_blocks_cache, "pull_blocks needs a blocks cache, use pull_cache")
        src, dst = block_array("src_blocks", src_blocks), block_array("dst_blocks", dst_blocks)
        check(len(dst) > 0, "dst_blocks is empty")
        by_blocks = isinstance(src_cache_key, BlocksCacheKey)
        check(by_blocks == (len(src) > 0), "src_blocks goes with a BlocksCacheKey only")
        ref = ref_of(src_cache_key)
        layers = layer_options(kwargs)
        with engine_errors("pull_blocks"):
            self._engine.pull_blocks(
                src_cache_key.cluster_id & UINT64_MASK, ref, dst_cache.cache_id, src, dst, *layers
            )

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
        """Copy row ``src_batch_index`` into a peer's row. The peer checks and copies; this call
        waits for its answer. Without ranges all layers of the source go to the same ones."""
        self._require_push()
        check_type("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        check_type("src_cache", src_cache, Cache)
        check(not src_cache.is_blocks_cache, "push_cache needs a contiguous cache, use push_blocks")
        check_uint32("src_batch_index", src_batch_index)
        check_int64("size", size)
        check(size == -1, f"size must be -1, got {size}")
        layers = _push_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        ref = ref_of(dst_cache_key)
        with engine_errors("push_cache"):
            self._engine.push_cache(
                dst_cache_key.cluster_id, ref, src_cache.cache_id, src_batch_index, *layers
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
        *,
        token: int | None = None,
    ) -> None:
        """Copy ``src_blocks[i]`` into a peer's ``dst_blocks[i]``; see ``push_cache``.

        With a ``token`` (an extension) ``dst_blocks`` are positions in the reservation that the
        peer has opened; once it is closed, the call ends with ``LLM_KV_CACHE_NOT_EXIST``.
        """
        self._require_push()
        check_type("dst_cache_key", dst_cache_key, BlocksCacheKey)
        check_type("src_cache", src_cache, Cache)
        check(src_cache.is_blocks_cache, "push_blocks needs a blocks cache, use push_cache")
        src, dst = block_array("src_blocks", src_blocks), block_array("dst_blocks", dst_blocks)
        check(len(dst) > 0, "dst_blocks is empty")
        check_token(token)
        layers = _push_layers(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        ref = ref_of(dst_cache_key)
        with engine_errors("push_blocks"):
            self._engine.push_blocks(
                dst_cache_key.cluster_id & UINT64_MASK,
                ref,
                src_cache.cache_id,
                src,
                dst,
                *layers,
                token or 0,
            )

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[AnyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
        *,
        tensor_num_per_layer: int = 2,
    ) -> CacheTask:
        """Push layer after layer, each as soon as ``layer_synchronizer`` says that it is computed.

        Message mode takes ``TransferConfig``, remote-access mode ``TransferWithCacheKeyConfig``.
        Blocks go to blocks; without ``src_block_indices`` row ``src_batch_index`` of the source
        goes to a row, or is cut into chunks of ``dst_block_memory_size`` bytes, chunk i to
        ``dst_block_indices[i]``. ``sync_kv_timeout`` bounds each layer of each destination; the
        first failure ends the whole transfer. ``tensor_num_per_layer`` is an extension.
        """
        self._require_open()
        check_type("src_cache", src_cache, Cache)
        with engine_errors("transfer_cache_async"):
            task = start_transfer(
                self._engine,
                src_cache,
                layer_synchronizer,
                transfer_configs,
                src_block_indices,
                dst_block_indices,
                dst_block_memory_size,
                tensor_num_per_layer,
                by_key=self._remote_access,
            )
        return CacheTask(task)

    def require_reservations(self, cache: Cache) -> None:
        """Let peers' pushes write into reservations of this cache only; pulls are not concerned.

        An extension of the vendor's API.
        """
        self._require_open()
        check_type("cache", cache, Cache)
        with engine_errors("require_reservations"):
            self._engine.require_reservations(cache.cache_id)

    def open_reservation(self, cache: Cache, blocks: Sequence[int]) -> int:
        """Set blocks of a blocks cache aside for pushes that carry the returned token.

        Such a push names them by position. An extension of the vendor's API.
        """
        self._require_open()
        check_type("cache", cache, Cache)
        reserved = block_array("blocks", blocks)
        with engine_errors("open_reservation"):
            return self._engine.open_reservation(cache.cache_id, reserved)

    def close_reservation(self, token: int) -> None:
        """Allow no more copies for this token; an unknown one is no error.

        Returns when no copy for it runs. It waits for no other process.
        """
        self._require_open()
        check_int64("token", token)
        check(token > 0, f"token {token} is none of open_reservation")
        with engine_errors("close_reservation"):
            self._engine.close_reservation(token)

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Exactly one of req_id and prefix_id of a key used for a pull names something."""
        check_cache_key(cache_key)

    def _require_open(self) -> None:
        check(not self._closed, "the LLMDataDist of this CacheManager is finalized")

    def _accessible(self, cache_desc: CacheDesc, remote_accessible: bool | None) -> bool:
        if remote_accessible is None:
            return cache_desc.placement == Placement.DEVICE and not self._called_link
        return remote_accessible

    def _check_memory(
        self, cache_desc: CacheDesc, addrs: list[int], remote_accessible: bool | None
    ) -> None:
        _check_memory(cache_desc, addrs, remote_accessible)
        check(
            not (self._called_link and remote_accessible),
            "memory that peers shall access must be registered before link() is called",
        )

    def _require_push(self) -> None:
        self._require_open()
        check(self._remote_access, "a push needs enable_remote_cache_accessible = True")


def _check_memory(cache_desc: CacheDesc, addrs: list[int], remote_accessible: bool | None) -> None:
    check_type("cache_desc", cache_desc, CacheDesc)
    check_type("addrs", addrs, list)
    for addr in addrs:
        check_uint64("addrs inner", addr)
    check(len(addrs) > 0, "addrs is empty")
    if remote_accessible is not None:
        check_type("remote_accessible", remote_accessible, bool)


def _push_layers(
    src_cache: Cache, src: range | None, dst: range | None, per_layer: int
) -> LayerOptions:
    check_per_layer(per_layer)
    num_tensors = src_cache.cache_desc.num_tensors
    check(
        num_tensors % per_layer == 0,
        f"tensor_num_per_layer {per_layer} does not divide {num_tensors} tensors",
    )
    every = range(num_tensors // per_layer)
    src, dst = every if src is None else src, every if dst is None else dst
    src_layers, dst_layers = (
        check_range("src_layer_range", src),
        check_range("dst_layer_range", dst),
    )
    check(len(src) == len(dst), f"layer ranges differ in length: {len(src)} and {len(dst)}")
    return src_layers, dst_layers, per_layer
