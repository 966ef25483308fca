"""Argument checks with the exception types of the LLM-DataDist API.

A wrong type is a ``TypeError``, an integer out of range a ``ValueError``, any other bad value an
``LLMException``. ``None`` is a wrong type unless a parameter says otherwise.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import Any

from vllm_llmdd_connector.datadist.status import fail

__all__ = [
    "UINT64_MASK",
    "block_array",
    "check",
    "check_elements",
    "check_int",
    "check_int32",
    "check_int64",
    "check_range",
    "check_token",
    "check_type",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]

UINT64_MASK = 2**64 - 1
"""Of ids, which may be given as negative numbers."""


def check(condition: bool, message: str) -> None:
    if not condition:
        fail(message)


def check_type(name: str, value: object, *types: type) -> None:
    if not isinstance(value, types):
        names = ", ".join(accepted.__name__ for accepted in types)
        raise TypeError(f"{name} only support {names}, got {type(value).__name__}")


def check_elements(name: str, values: Collection[Any], *types: type) -> None:
    for value in values:
        if not isinstance(value, types):
            names = ", ".join(accepted.__name__ for accepted in types)
            raise TypeError(f"{name} inner type only support {names}, got {type(value).__name__}")


def check_int(name: str, value: object, low: int, high: int) -> None:
    """``low`` and ``high`` are inclusive."""
    check_type(name, value, int)
    assert isinstance(value, int)
    if not low <= value <= high:
        raise ValueError(f"{name} value is out of range [{low}, {high}]: {value}")


def check_uint16(name: str, value: object) -> None:
    check_int(name, value, 0, 2**16 - 1)


def check_uint32(name: str, value: object) -> None:
    check_int(name, value, 0, 2**32 - 1)


def check_uint64(name: str, value: object) -> None:
    check_int(name, value, 0, UINT64_MASK)


def check_int32(name: str, value: object) -> None:
    check_int(name, value, -(2**31), 2**31 - 1)


def check_int64(name: str, value: object) -> None:
    check_int(name, value, -(2**63), 2**63 - 1)


def check_range(name: str, value: range | None) -> tuple[int, int] | None:
    """Check a layer range and return it as (start, stop); ``None`` stays ``None``."""
    if value is None:
        return None
    check_type(name, value, range)
    check(value.step == 1, f"{name} step is {value.step}, must be 1")
    check(
        0 <= value.start < value.stop,
        f"{name} must satisfy 0 <= start < stop, got [{value.start}, {value.stop})",
    )
    return value.start, value.stop


def check_token(token: int | None) -> None:
    """A token of ``open_reservation``, or ``None``."""
    if token is None:
        return
    check_int64("token", token)
    check(token > 0, f"token {token} is none of open_reservation")


def block_array(name: str, blocks: Sequence[int]) -> array[int]:
    """Block indices as the engine takes them. A list of thousands costs tens of microseconds."""
    check_type(name, blocks, list, tuple)
    try:
        return array("Q", blocks)
    except (TypeError, OverflowError) as error:
        raise TypeError(f"{name} inner type only support int of 0 and above: {error}") from None
