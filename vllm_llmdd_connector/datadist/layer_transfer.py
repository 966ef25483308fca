"""``transfer_cache_async``: its checks, in the vendor's order, and the request they make.

What needs the engine's tables is found out by the transfer and stands in its results.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.checks import (
    UINT64_MASK,
    check,
    check_elements,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.kv_cache import KvCache
from vllm_llmdd_connector.datadist.native_synchronizer import NativeLayerSynchronizer
from vllm_llmdd_connector.datadist.refs import NO_REF, Ref, ref_of
from vllm_llmdd_connector.datadist.transfer_config import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from vllm_llmdd_connector.datadist.types import Cache, Placement

__all__ = ["AnyConfig", "start_transfer"]

AnyConfig = TransferConfig | TransferWithCacheKeyConfig
_Target = tuple[int, Ref, Sequence[int], tuple[int, int], int, int, int]


def start_transfer(
    engine: _engine.HostEngine,
    src_cache: Cache | KvCache,
    layer_synchronizer: LayerSynchronizer,
    transfer_configs: Sequence[AnyConfig],
    src_block_indices: Sequence[int] | None,
    dst_block_indices: Sequence[int] | None,
    dst_block_memory_size: int | None,
    tensor_num_per_layer: int,
    *,
    by_key: bool,
    rows_to_blocks: bool = True,
) -> _engine.LayerTask:
    """Check everything and start the transfer's thread.

    ``by_key`` says which configs fit; without ``rows_to_blocks`` only blocks go to blocks.
    """
    check(src_cache.cache_desc.placement != Placement.HOST, "the source cache has placement HOST")
    dst_blocks = _indices("dst_block_indices", dst_block_indices)
    src_blocks = _indices("src_block_indices", src_block_indices)
    if dst_block_memory_size is not None:
        check_uint64("dst_block_memory_size", dst_block_memory_size)
    check(
        rows_to_blocks or len(src_blocks) > 0 or dst_block_indices is None,
        "dst_block_indices needs src_block_indices: a row cannot go to blocks",
    )
    _check_blocks(src_blocks, dst_blocks, dst_block_memory_size)
    check_type("layer_synchronizer", layer_synchronizer, LayerSynchronizer)
    check_type("transfer_configs", transfer_configs, list, tuple)
    config_type = TransferWithCacheKeyConfig if by_key else TransferConfig
    check_elements("transfer_configs", transfer_configs, config_type)
    check(
        not dst_block_memory_size or len(dst_blocks) > 0,
        "dst_block_memory_size goes with dst_block_indices only",
    )
    num_layers = _num_layers(src_cache, tensor_num_per_layer)
    for config in transfer_configs:
        _check_config(config, num_layers, tensor_num_per_layer, src_blocks, dst_blocks)
    return engine.transfer(
        src_cache.cache_id,
        num_layers,
        tensor_num_per_layer,
        src_blocks,
        dst_blocks,
        dst_block_memory_size or 0,
        [_target(config) for config in transfer_configs],
        _gate(layer_synchronizer),
    )


def _indices(name: str, blocks: Sequence[int] | None) -> array[int]:
    if blocks is None:
        return array("Q")
    check_type(name, blocks, list, tuple)
    try:
        return array("Q", blocks)
    except TypeError as error:
        raise TypeError(f"{name} inner type only support int: {error}") from None
    except OverflowError as error:
        raise ValueError(f"{name} inner value is out of range [0, 2**64): {error}") from None


def _check_blocks(src: array[int], dst: array[int], dst_block_memory_size: int | None) -> None:
    if src:
        check(len(dst) > 0, "blocks go to blocks: dst_block_indices is empty")
        check(len(src) == len(dst), f"{len(src)} source blocks for {len(dst)} destination blocks")
    elif dst:
        check(
            dst_block_memory_size is not None,
            "a row goes to blocks: dst_block_memory_size is needed",
        )


def _num_layers(src_cache: Cache | KvCache, per_layer: int) -> int:
    check_uint32("tensor_num_per_layer", per_layer)
    check(per_layer > 0, "tensor_num_per_layer must be above 0")
    num_tensors = src_cache.cache_desc.num_tensors
    check(
        num_tensors % per_layer == 0,
        f"{num_tensors} tensors do not divide into layers of {per_layer}",
    )
    return num_tensors // per_layer


def _check_config(
    config: AnyConfig, num_layers: int, per_layer: int, src: array[int], dst: array[int]
) -> None:
    if config.src_layer_range is None:
        config.src_layer_range = range(num_layers)
    layers = config.src_layer_range
    check(
        not src or config.src_batch_index == 0,
        f"src_batch_index must be 0 with src_block_indices, got {config.src_batch_index}",
    )
    check(
        0 <= layers.start < layers.stop <= num_layers,
        f"src_layer_range [{layers.start}, {layers.stop}) is outside [0, {num_layers})",
    )
    if isinstance(config, TransferConfig):
        check(
            len(config.dst_addrs) == per_layer * len(layers),
            f"{len(config.dst_addrs)} dst_addrs for {len(layers)} layers of {per_layer} tensors",
        )
        return
    check(
        len(config.dst_layer_range) == len(layers),
        f"layer ranges differ in length: {len(layers)} and {len(config.dst_layer_range)}",
    )
    check(config.token is None or len(dst) > 0, "a token goes with dst_block_indices")


def _target(config: AnyConfig) -> _Target:
    layers = config.src_layer_range
    assert layers is not None
    span = (layers.start, layers.stop)
    if isinstance(config, TransferConfig):
        # An empty list would mean a destination by key; it cannot pass the checks.
        return config.dst_cluster_id, NO_REF, config.dst_addrs, span, 0, config.src_batch_index, 0
    key = config.cache_key
    return (
        key.cluster_id & UINT64_MASK,
        ref_of(key),
        (),
        span,
        config.dst_layer_range.start,
        config.src_batch_index,
        config.token or 0,
    )


def _gate(synchronizer: LayerSynchronizer) -> object:
    marks = synchronizer.gate() if isinstance(synchronizer, NativeLayerSynchronizer) else None
    return synchronizer.synchronize_layer if marks is None else marks
