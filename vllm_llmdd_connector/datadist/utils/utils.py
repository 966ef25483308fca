"""Argument checks under the names that programs import from ``llm_datadist.utils.utils``."""

from vllm_llmdd_connector.datadist.checks import (
    check_int32,
    check_int64,
    check_type,
    check_uint16,
    check_uint32,
    check_uint64,
)

__all__ = [
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]


def check_isinstance(name: str, value: object, accepted: type | list[type]) -> None:
    """``TypeError`` unless the value is of an accepted type."""
    check_type(name, value, *(accepted if isinstance(accepted, list) else [accepted]))
