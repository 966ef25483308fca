"""Public names whose modules are imported when they are first used.

The first generation's classes need numpy in parts, and most programs use neither them nor
layer-wise transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["lazy_names"]

_PACKAGE = "vllm_llmdd_connector.datadist"
_HOMES = {
    "CacheTask": "cache_task",
    "KvCache": "kv_cache",
    "KvCacheManager": "kv_cache_manager",
    "NativeLayerSynchronizer": "native_synchronizer",
    "Tensor": "tensor",
    "TensorDesc": "tensor",
}


def lazy_names(module: str, *names: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that knows these names."""

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(f"{_PACKAGE}.{_HOMES[name]}"), name)

    return getattribute
