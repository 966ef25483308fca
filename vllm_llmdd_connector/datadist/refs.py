"""Keys, layer ranges and block mappings in the form the engine takes them."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_llmdd_connector.datadist.checks import (
    UINT64_MASK,
    check,
    check_int64,
    check_range,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.keys import (
    INVALID_ID,
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
)
from vllm_llmdd_connector.datadist.types import CacheDesc

__all__ = [
    "NO_REF",
    "AnyKey",
    "KeyFields",
    "LayerOptions",
    "Range",
    "Ref",
    "check_cache_key",
    "check_copied_row",
    "check_per_layer",
    "check_row",
    "copy_pairs",
    "key_fields",
    "layer_options",
    "model_id_of",
    "ref_of",
    "swap_pairs",
]

logger = logging.getLogger(__name__)

AnyKey = CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey
Range = tuple[int, int] | None
Ref = tuple[int, int, int, int]
LayerOptions = tuple[Range, Range, int]
KeyFields = tuple[int, int, int]
BlockPairs = tuple["array[int]", "array[int]"]

# KeyKind of csrc/model/cache_key.h.
_BY_REQUEST, _BY_PREFIX, _BY_MODEL, _BY_ID = range(4)
NO_REF: Ref = (_BY_MODEL, 0, 0, 0)
_LAYER_OPTIONS = frozenset({"src_layer_range", "dst_layer_range", "tensor_num_per_layer"})


def check_cache_key(cache_key: CacheKey) -> None:
    """Exactly one of req_id and prefix_id of a key used for a pull names something."""
    check(
        (cache_key.req_id == INVALID_ID) != (cache_key.prefix_id == INVALID_ID),
        f"exactly one of req_id and prefix_id must be valid in {cache_key}",
    )


def key_fields(cache_key: CacheKey) -> KeyFields:
    """What a row is bound to: request, prefix and model id."""
    return cache_key.req_id, cache_key.prefix_id, cache_key.model_id


def model_id_of(blocks_cache_key: BlocksCacheKey | None) -> int | None:
    """What a blocks cache is bound to, if to anything."""
    if blocks_cache_key is None:
        return None
    check_type("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
    return blocks_cache_key.model_id & UINT64_MASK


def check_row(batch_index: int, size: int) -> None:
    """Destination row of a pull, and how many bytes: -1 for all of it."""
    check_uint32("batch_index", batch_index)
    _check_size(size)


def check_copied_row(
    dst_batch_index: int, src_batch_index: int, offset: int, size: int, req_id: int | None
) -> None:
    """Arguments of ``copy_cache`` besides its caches."""
    check_uint32("dst_batch_index", dst_batch_index)
    check_uint32("src_batch_index", src_batch_index)
    check_uint64("offset", offset)
    _check_size(size)
    if req_id is not None:
        check_uint64("req_id", req_id)


def _check_size(size: int) -> None:
    check_int64("size", size)
    check(size == -1 or size > 0, f"size must be -1 or above 0, got {size}")


def ref_of(key: AnyKey) -> Ref:
    if isinstance(key, BlocksCacheKey):
        return _BY_MODEL, 0, key.model_id & UINT64_MASK, 0
    if isinstance(key, CacheKeyByIdAndIndex):
        return _BY_ID, key.cache_id & UINT64_MASK, 0, key.batch_index
    check_cache_key(key)
    if key.prefix_id != INVALID_ID:
        return _BY_PREFIX, key.prefix_id, key.model_id, 0
    return _BY_REQUEST, key.req_id, key.model_id, 0


def layer_options(options: Mapping[str, Any]) -> LayerOptions:
    """The options of a pull; unknown ones are only warned of, as the vendor ignores them."""
    for name in options.keys() - _LAYER_OPTIONS:
        logger.warning("option %s of a pull is unknown and has no effect", name)
    per_layer = options.get("tensor_num_per_layer", 2)
    check_per_layer(per_layer)
    return (
        check_range("src_layer_range", options.get("src_layer_range")),
        check_range("dst_layer_range", options.get("dst_layer_range")),
        per_layer,
    )


def check_per_layer(tensor_num_per_layer: int) -> None:
    check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    check(tensor_num_per_layer > 0, "tensor_num_per_layer must be above 0")


def copy_pairs(copy_block_info: Mapping[int, Sequence[int]]) -> BlockPairs:
    """Source and destination blocks of ``{source: [destination, …]}``, in its order."""
    check_type("copy_block_info", copy_block_info, dict)
    src, dst = array("Q"), array("Q")
    for block, copies in copy_block_info.items():
        check_uint64("copy_block_info key", block)
        check_type("copy_block_info value", copies, list, tuple)
        for copy in copies:
            check_uint64("copy_block_info inner", copy)
            src.append(block)
            dst.append(copy)
    return src, dst


def swap_pairs(src: CacheDesc, dst: CacheDesc, src_to_dst: Mapping[int, int]) -> BlockPairs:
    """Source and destination blocks of ``{source: destination}``, of host and device memory."""
    check_type("src_to_dst", src_to_dst, dict)
    src_blocks, dst_blocks = array("Q"), array("Q")
    for source, destination in src_to_dst.items():
        check_uint64("src_to_dst key", source)
        check_uint64("src_to_dst value", destination)
        src_blocks.append(source)
        dst_blocks.append(destination)
    check(
        src.placement != dst.placement,
        f"both caches are of placement {src.placement.name}, swap_blocks goes between HOST and "
        "DEVICE",
    )
    return src_blocks, dst_blocks
