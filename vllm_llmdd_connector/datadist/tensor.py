"""``Tensor`` and ``TensorDesc`` of the first generation: memory seen as numpy arrays.

Only ``Tensor`` needs numpy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from vllm_llmdd_connector.datadist import data_type
from vllm_llmdd_connector.datadist.checks import check_int64, check_type
from vllm_llmdd_connector.datadist.types import DataType

__all__ = ["Tensor", "TensorDesc"]


def _numpy() -> Any:
    """Imported when it is needed, and not seen by type checkers: it may not be installed."""
    return import_module("numpy")


class TensorDesc:
    """Element type and shape of one tensor."""

    def __init__(self, dtype: DataType, shape: Sequence[int]) -> None:
        check_type("dtype", dtype, DataType)
        check_type("shape", shape, list, tuple)
        for dim in shape:
            check_int64("shape inner", dim)
        self._dtype = dtype
        self._shape = list(shape)

    @property
    def dtype(self) -> DataType:
        return self._dtype

    @property
    def shape(self) -> list[int]:
        return self._shape


class Tensor:
    """An array, or memory at an address (``data`` is an int; then ``tensor_desc`` is needed).

    Nothing is copied: the memory must outlive the tensor and the arrays made of it.
    """

    def __init__(self, data: Any, tensor_desc: TensorDesc | None = None) -> None:
        np = _numpy()
        check_type("data", data, np.ndarray, Tensor, int)
        if tensor_desc is not None:
            check_type("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            tensor_desc = data._desc if tensor_desc is None else tensor_desc
            data = data._array
        elif isinstance(data, int):
            if tensor_desc is None:
                raise RuntimeError("a tensor at an address needs a tensor_desc")
            data = _array_at(data, tensor_desc)
        self._desc: TensorDesc = _described(data) if tensor_desc is None else tensor_desc
        self._array: Any = data
        _check_fits(data, self._desc)

    @property
    def tensor_desc(self) -> TensorDesc:
        return self._desc

    def numpy(self, copy: bool = False) -> Any:
        """The elements as an array. BF16, which numpy does not know, comes as a float32 copy."""
        check_type("copy", copy, bool)
        if self._desc.dtype is DataType.DT_BF16:
            np = _numpy()
            halves = self._array.view(np.uint16).astype(np.uint32)
            return (halves << 16).view(np.float32)
        if self._desc.dtype is DataType.DT_STRING and not copy:
            raise RuntimeError("strings can only be copied; pass copy=True")
        return self._array.copy() if copy else self._array


def _array_at(addr: int, desc: TensorDesc) -> Any:
    size = math.prod(desc.shape) * desc.dtype.num_bytes
    memory = (ctypes.c_char * size).from_address(addr)
    kind = data_type.dtype_to_np_dtype[desc.dtype]
    return _numpy().frombuffer(memory, dtype=kind).reshape(desc.shape)


def _described(array: Any) -> TensorDesc:
    kind = array.dtype.type
    if kind not in data_type.np_dtype_to_dtype:
        raise RuntimeError(f"arrays of {array.dtype} cannot become tensors")
    return TensorDesc(data_type.np_dtype_to_dtype[kind], list(array.shape))


def _check_fits(array: Any, desc: TensorDesc) -> None:
    if list(array.shape) != desc.shape:
        raise RuntimeError(f"shape differs: array {list(array.shape)}, description {desc.shape}")
    if array.dtype.type is not data_type.dtype_to_np_dtype[desc.dtype]:
        raise RuntimeError(f"type differs: array {array.dtype}, description {desc.dtype.name}")
    if not array.flags.c_contiguous:
        raise RuntimeError("the array is not contiguous")
