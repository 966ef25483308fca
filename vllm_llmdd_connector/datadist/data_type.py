"""Element types and their counterparts in the engine and in numpy.

The numpy tables ``dtype_to_np_dtype``, ``np_dtype_to_dtype`` and ``valid_np_dtypes`` are made when
they are first asked for; nothing else here needs numpy.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from vllm_llmdd_connector.datadist.types import DataType

__all__ = [
    "DataType",
    "get_python_dtype_from_wrapper_dtype",
    "python_dtype_2_dwrapper_dtype",
]

#: The number by which the native side knows a type.
python_dtype_2_dwrapper_dtype: dict[DataType, int] = {kind: kind.value for kind in DataType}


def get_python_dtype_from_wrapper_dtype(wrapper_dtype: int) -> DataType:
    """The type of a number; ``ValueError`` for an unknown one."""
    return DataType(wrapper_dtype)


@cache
def _tables() -> dict[str, Any]:
    np: Any = import_module("numpy")  # may not be installed
    to_numpy = {
        DataType.DT_FLOAT: np.float32,
        DataType.DT_FLOAT16: np.float16,
        DataType.DT_BF16: np.float16,  # of the same size: numpy has no bfloat16
        DataType.DT_INT8: np.int8,
        DataType.DT_INT16: np.int16,
        DataType.DT_INT32: np.int32,
        DataType.DT_INT64: np.int64,
        DataType.DT_UINT8: np.uint8,
        DataType.DT_UINT16: np.uint16,
        DataType.DT_UINT32: np.uint32,
        DataType.DT_UINT64: np.uint64,
        DataType.DT_DOUBLE: np.float64,
        DataType.DT_BOOL: np.bool_,
        DataType.DT_STRING: np.bytes_,
    }
    from_numpy = {kind: ours for ours, kind in to_numpy.items() if ours != DataType.DT_BF16}
    return {
        "dtype_to_np_dtype": to_numpy,
        "np_dtype_to_dtype": from_numpy,
        "valid_np_dtypes": list(from_numpy),
    }


def __getattr__(name: str) -> Any:
    if name in ("dtype_to_np_dtype", "np_dtype_to_dtype", "valid_np_dtypes"):
        return _tables()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
