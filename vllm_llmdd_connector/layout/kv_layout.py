"""From the KV tensors that vLLM registers to block caches, for any layout in host or device memory.

A *region* is one array of equally long blocks, ``block_len`` bytes each, without gaps: what
LLM-DataDist calls a tensor of a blocks cache. vLLM hands over a tensor, a tuple or a list per
layer; on its CPU build one tensor ``[num_blocks, kv_heads, block_size, 2 * head_size]``, on Ascend
a K and a V tensor ``[num_blocks, block_size, kv_heads, head_size]``, elsewhere ``[2, num_blocks,
...]``. The inner order of a block does not matter as long as both sides have the same, which the
fingerprint compares.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from vllm_llmdd_connector.errors import ConfigError


class PartGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One block of one tensor of a layer, as both sides must have it."""

    dtype: str
    shape: tuple[int, ...]
    """Without the block dimension."""
    strides: tuple[int, ...]
    """In elements, of the same dimensions."""
    block_len: int
    """Bytes."""


class GroupGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group. The number of blocks is left out: it may differ."""

    kind: str
    """Class of vLLM's KV cache spec."""
    block_size: int
    """Tokens in a block."""
    layers: tuple[str, ...]
    parts: tuple[PartGeometry, ...]
    """The distinct geometries of the group's tensors, in order of first use."""


class Region(NamedTuple):
    """Equally long blocks in one piece of memory."""

    name: str
    """Layer name, with the part's number where a layer has several."""
    base: int
    """Address of block 0."""
    block_len: int
    """Bytes of a block, and the distance to the next one."""
    layers: tuple[str, ...] = ()
    """The layers that write it; it is computed when all of them are."""


class CachePlan(NamedTuple):
    """One blocks cache to register: the regions of one group that have equally long blocks."""

    model_id: int
    """Its ``BlocksCacheKey.model_id``; both sides count alike because their geometries are
    equal."""
    group_index: int
    num_blocks: int
    block_len: int
    regions: tuple[Region, ...]

    @property
    def tensors_per_layer(self) -> int:
        """2 where regions of the same layers lie in pairs, as K and V do; else 1."""
        firsts, seconds = self.regions[::2], self.regions[1::2]
        in_pairs = len(firsts) == len(seconds) and all(
            first.layers == second.layers for first, second in zip(firsts, seconds, strict=True)
        )
        return 2 if in_pairs else 1

    @property
    def num_layers(self) -> int:
        """Steps in which a layer-wise transfer sends it."""
        return len(self.regions) // self.tensors_per_layer


class _Part(NamedTuple):
    """One tensor seen as blocks."""

    name: str
    layer: str
    base: int
    block_stride: int
    geometry: PartGeometry


def group_geometry(
    kind: str,
    block_size: int,
    layers: Sequence[str],
    kv_caches: Mapping[str, Any],
    num_blocks: int,
) -> GroupGeometry:
    """What the fingerprint says of one group."""
    parts = _group_parts(layers, kv_caches, num_blocks)
    return GroupGeometry(
        kind=kind,
        block_size=block_size,
        layers=tuple(layers),
        parts=tuple(dict.fromkeys(part.geometry for part in parts)),
    )


def plan_caches(
    groups: Sequence[Sequence[str]], kv_caches: Mapping[str, Any], num_blocks: int
) -> list[CachePlan]:
    """The blocks caches of an engine.

    Args:
        groups: layer names per KV cache group, in vLLM's order.
        kv_caches: layer name to tensor, or tuple or list of tensors.
        num_blocks: blocks in vLLM's block pool; a tensor of smaller kernel blocks has a multiple.

    Tensors of equal address in one group are one region: layers that share their KV. Two groups may
    overlay the same memory; each gets its own caches.

    Raises:
        ConfigError: a tensor is not made of blocks in one piece, or a layer has no tensor.
    """
    plans: list[CachePlan] = []
    for group_index, layers in enumerate(groups):
        by_len: dict[int, dict[int, Region]] = defaultdict(dict)
        for region in _regions(_group_parts(layers, kv_caches, num_blocks)):
            by_len[region.block_len].setdefault(region.base, region)
        for block_len, regions in by_len.items():
            plans.append(
                CachePlan(len(plans), group_index, num_blocks, block_len, tuple(regions.values()))
            )
    return plans


def _group_parts(
    layers: Sequence[str], kv_caches: Mapping[str, Any], num_blocks: int
) -> list[_Part]:
    parts: list[_Part] = []
    for layer in layers:
        if layer not in kv_caches:
            raise ConfigError(f"layer {layer} of the KV cache has no registered tensor")
        parts.extend(_layer_parts(layer, kv_caches[layer], num_blocks))
    return parts


def _layer_parts(layer: str, value: Any, num_blocks: int) -> list[_Part]:
    tensors = list(value) if isinstance(value, tuple | list) else [value]
    split: list[Any] = []
    for tensor in tensors:
        if tensor.shape[0] % num_blocks and tensor.shape[0] == 2:
            split.extend([tensor[0], tensor[1]])
        else:
            split.append(tensor)
    if len(split) == 1:
        return [_part(layer, layer, split[0], num_blocks)]
    return [_part(f"{layer}#{i}", layer, tensor, num_blocks) for i, tensor in enumerate(split)]


def _part(name: str, layer: str, tensor: Any, num_blocks: int) -> _Part:
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    item = tensor.element_size()
    if shape[0] == 0 or shape[0] % num_blocks:
        raise ConfigError(
            f"KV tensor of layer {name} has shape {list(shape)}: its first dimension is no "
            f"multiple of the {num_blocks} blocks of the cache"
        )
    inner_len = _dense_len(shape[1:], strides[1:]) * item
    if not inner_len:
        raise ConfigError(
            f"KV tensor of layer {name} has gaps inside a block "
            f"(shape {list(shape)}, strides {list(strides)}); use a contiguous KV cache layout"
        )
    kernel_blocks = shape[0] // num_blocks
    if kernel_blocks > 1 and strides[0] * item != inner_len:
        raise ConfigError(
            f"KV tensor of layer {name} has {kernel_blocks} kernel blocks in a block with gaps "
            f"between them (strides {list(strides)}); use a contiguous KV cache layout"
        )
    geometry = PartGeometry(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=(kernel_blocks, *shape[1:]),
        strides=strides[1:],
        block_len=inner_len * kernel_blocks,
    )
    return _Part(name, layer, tensor.data_ptr(), strides[0] * item * kernel_blocks, geometry)


def _dense_len(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Elements of a block if its dimensions, in any order, leave no gap; otherwise 0."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return 0
        expected *= size
    return expected


def _regions(parts: Sequence[_Part]) -> list[Region]:
    """Parts without gaps between blocks as they are; interleaved ones joined to whole rows."""
    regions: list[Region] = []
    interleaved: dict[int, list[_Part]] = defaultdict(list)
    for part in parts:
        if part.block_stride == part.geometry.block_len:
            regions.append(Region(part.name, part.base, part.geometry.block_len, (part.layer,)))
        else:
            interleaved[part.block_stride].append(part)
    for stride, members in interleaved.items():
        regions.extend(_joined_rows(stride, members))
    return regions


def _joined_rows(stride: int, parts: Sequence[_Part]) -> list[Region]:
    """Layers that lie side by side in each block: one region per run that fills a row exactly."""
    regions: list[Region] = []
    row: list[_Part] = []
    filled = 0
    # Layers that share their KV count once, wherever in the row they are; the first one names it.
    distinct = {part.base: part for part in reversed(parts)}
    for part in sorted(distinct.values(), key=lambda part: part.base):
        if row and part.base != row[0].base + filled:
            break
        row.append(part)
        filled += part.geometry.block_len
        if filled == stride:
            name = "+".join(member.name for member in row)
            layers = tuple(member.layer for member in row)
            regions.append(Region(name, row[0].base, stride, layers))
            row, filled = [], 0
    if row:
        raise ConfigError(
            f"KV blocks of layer {row[0].name} lie {stride} bytes apart but only {filled} of them "
            "belong to this KV cache group; use a layout with one region per layer"
        )
    return regions
