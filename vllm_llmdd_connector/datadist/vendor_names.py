"""The module name ``llm_datadist`` for this package, in this process, once ``install`` is called.

Submodules that this package has under the same name are those; the vendor's other ones offer every
public name of the package, since which of them holds what differs between the vendor's versions.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["VENDOR", "install"]

VENDOR = "llm_datadist"
_OURS = "vllm_llmdd_connector.datadist"
_PACKAGES = ("utils", "v2")
_MODULES = (
    "configs",
    "data_type",
    "status",
    "utils.log",
    "utils.utils",
    "v2.cache_manager",
    "v2.config",
    "v2.llm_datadist",
    "v2.llm_types",
    "v2.llm_utils",
)


def install() -> None:
    """Make ``import llm_datadist`` lead here, also where the vendor's package is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == VENDOR]:
        del sys.modules[name]
    ours = importlib.import_module(_OURS)
    _add(VENDOR, _forwarding(VENDOR, ours, is_package=True))
    for name in (*_PACKAGES, *_MODULES):
        _add(f"{VENDOR}.{name}", _submodule(name, ours))


def _add(full_name: str, module: ModuleType) -> None:
    sys.modules[full_name] = module
    parent, _, name = full_name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


def _submodule(name: str, ours: ModuleType) -> ModuleType:
    is_package = name in _PACKAGES
    full_name = f"{VENDOR}.{name}"
    if is_package or importlib.util.find_spec(f"{_OURS}.{name.split('.')[0]}") is None:
        return _forwarding(full_name, ours, is_package)
    try:
        target = importlib.import_module(f"{_OURS}.{name}")
    except ModuleNotFoundError:
        target = ours
    return _forwarding(full_name, target, is_package, ours)


def _forwarding(
    full_name: str, target: ModuleType, is_package: bool, fallback: ModuleType | None = None
) -> ModuleType:
    """A module with the names of ``target``, and after them those of ``fallback``. The objects are
    the same, so that it does not matter by which path a program imports them."""
    module = ModuleType(full_name, target.__doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(full_name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    names: dict[str, Any] = vars(module)
    names["__file__"] = target.__file__
    names["__all__"] = list(getattr(target, "__all__", ()))
    names["__getattr__"] = _lookup(full_name, [target] if fallback is None else [target, fallback])
    return module


def _lookup(full_name: str, sources: list[ModuleType]) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        for source in sources:
            if not name.startswith("__") and hasattr(source, name):
                return getattr(source, name)
        raise AttributeError(f"module {full_name!r} has no attribute {name!r}")

    return find
