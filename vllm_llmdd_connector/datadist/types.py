"""Enums and descriptors of the LLM-DataDist API. Nothing here talks to the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, IntEnum

from vllm_llmdd_connector.datadist.checks import (
    check,
    check_elements,
    check_int32,
    check_int64,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.status import fail

__all__ = [
    "Cache",
    "CacheDesc",
    "DataType",
    "LLMRole",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
]


class LLMRole(IntEnum):
    """A label: every method works for every role."""

    PROMPT = 1
    DECODER = 2
    MIX = 3

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Placement(IntEnum):
    """Where a cache lies. On the host engine DEVICE, too, means this process's own memory."""

    HOST = 0
    DEVICE = 1

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class Memtype(Enum):
    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    OK = 0
    PREPARING = 1
    FAILED = 2


class DataType(Enum):
    """Element types; the values are ge::DataType's."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_UINT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT64: 8,
    DataType.DT_DOUBLE: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_STRING: 16,
    DataType.DT_BF16: 2,
}


class CacheDesc:
    """Shape of a cache: ``num_tensors`` tensors of ``shape``.

    The first dimension counts the batch rows, or the blocks of a blocks cache, whatever
    ``batch_dim_index`` says; ``seq_len_dim_index`` has no effect on the bytes that move.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        check_uint32("num_tensors", num_tensors)
        check_type("shape", shape, list, tuple)
        for dim in shape:
            check_int64("shape inner", dim)
        check_type("data_type", data_type, DataType)
        check_type("placement", placement, Placement)
        check_type("batch_dim_index", batch_dim_index, int)
        check(
            0 <= batch_dim_index < len(shape),
            f"batch_dim_index {batch_dim_index} is outside [0, {len(shape)})",
        )
        check_int32("seq_len_dim_index", seq_len_dim_index)
        check(
            -1 <= seq_len_dim_index < len(shape),
            f"seq_len_dim_index {seq_len_dim_index} is outside [-1, {len(shape)})",
        )
        if kv_tensor_format is not None:
            check_type("kv_tensor_format", kv_tensor_format, str)
        self._num_tensors = num_tensors
        self._shape = list(shape)
        self._data_type = data_type
        self._placement = placement
        self._batch_dim = batch_dim_index
        self._batch_size = self._shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format

    @property
    def num_tensors(self) -> int:
        return self._num_tensors

    @property
    def shape(self) -> list[int]:
        return self._shape

    @property
    def data_type(self) -> DataType:
        return self._data_type

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def batch_dim(self) -> int:
        return self._batch_dim

    @property
    def batch_size(self) -> int:
        """``shape[batch_dim]`` at construction."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor."""
        size = math.prod(self._shape) * self._data_type.num_bytes
        if min(self._shape) <= 0 or size >= 2**63:
            fail(f"the shape {self._shape} has no size in bytes")
        return size

    def update_dim(self, dim_index: int, value: int) -> None:
        check_type("dim_index", dim_index, int)
        check(
            0 <= dim_index < len(self._shape),
            f"dim_index {dim_index} is outside [0, {len(self._shape)})",
        )
        check_int64("value", value)
        self._shape[dim_index] = value

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, "
            f"data_type={self._data_type.name}, placement={self._placement.name})"
        )


class Cache:
    """A registered or allocated cache, made by ``CacheManager``. It owns no memory by itself."""

    def __init__(
        self, cache_id: int, cache_desc: CacheDesc, tensor_addrs: list[int], is_blocks_cache: bool
    ) -> None:
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._is_blocks_cache = is_blocks_cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """A description of host memory that is not registered (for ``swap_blocks``)."""
        check_type("cache_desc", cache_desc, CacheDesc)
        check_type("addrs", addrs, list)
        check_elements("addrs", addrs, int)
        check(cache_desc.placement == Placement.HOST, "a CPU cache needs placement HOST")
        check(
            len(addrs) == cache_desc.num_tensors,
            f"{len(addrs)} addresses for {cache_desc.num_tensors} tensors",
        )
        return cls(-1, cache_desc, list(addrs), True)

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        return self._tensor_addrs

    def forget_addrs(self) -> None:
        """The memory is no longer the holder's to use."""
        self._tensor_addrs = []

    @property
    def is_blocks_cache(self) -> bool:
        return self._is_blocks_cache

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._tensor_addrs)}, "
            f"is_blocks_cache = {self._is_blocks_cache})"
        )


class MemInfo:
    """A piece of memory."""

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        check_type("mem_type", mem_type, Memtype)
        check_uint64("addr", addr)
        check_uint64("size", size)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    @property
    def mem_type(self) -> Memtype:
        return self._mem_type

    @property
    def addr(self) -> int:
        return self._addr

    @property
    def size(self) -> int:
        return self._size
