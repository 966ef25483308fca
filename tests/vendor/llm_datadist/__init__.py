"""Put the folder above on the import path, and our engine stands under the vendor's name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType

from fakes import strict_vendor

_MODULES = (
    *("configs", "data_type", "status", "utils", "utils.log", "utils.utils", "v2"),
    *("v2.cache_manager", "v2.config", "v2.llm_datadist", "v2.llm_types", "v2.llm_utils"),
)
_OURS = "vllm_llmdd_connector.datadist"

__all__ = strict_vendor.__all__


def _finder(full_name: str, *sources: ModuleType) -> Callable[[str], object]:
    def find(name: str) -> object:
        for source in sources:
            if not name.startswith("__") and hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(f"module {full_name!r} has no attribute {name!r}")

    return find


def _add_submodules() -> None:
    """With the names of the stand-in, and after them those that ours has in that submodule."""
    for name in _MODULES:
        full_name = f"{__name__}.{name}"
        module = ModuleType(full_name)
        if name in ("utils", "v2"):
            module.__path__ = []
        ours = importlib.import_module(f"{_OURS}.{name}")
        module.__dict__["__getattr__"] = _finder(full_name, strict_vendor, ours)
        sys.modules[full_name] = module
        parent, _, last = full_name.rpartition(".")
        setattr(sys.modules[parent], last, module)


def __getattr__(name: str) -> object:
    """Classes that our package imports when they are first used."""
    if name in _LAZY:
        return getattr(strict_vendor, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_LAZY = frozenset({"CacheTask", "KvCache", "KvCacheManager", "Tensor", "TensorDesc"})
globals().update({name: getattr(strict_vendor, name) for name in {*__all__} - _LAZY})
_add_submodules()
