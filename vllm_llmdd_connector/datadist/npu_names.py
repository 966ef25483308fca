"""The few names of ``torch_npu`` that scripts for ``llm_datadist`` use, meaning the host.

Active only after ``install`` and only where torch_npu is not installed. torch itself is imported
when the script does it. A tensor "on the NPU" is a copy in host memory; ``cpu()`` copies it back,
because a script expects its CPU copy to stay as it was when it pulls into the other one.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]


def install() -> None:
    """Watch for the imports of torch and torch_npu, unless the real torch_npu is there."""
    if importlib.util.find_spec("torch_npu") is not None:
        return
    if "torch" in sys.modules:
        _add_names(sys.modules["torch"])
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Serves ``torch_npu``, and adds ``torch.npu`` once torch has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torch_npu":
            return importlib.util.spec_from_loader(fullname, _TorchNpuLoader())
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _TorchLoader(spec.loader)
        return spec


class _TorchLoader(importlib.abc.Loader):
    """torch's own loader, and our names afterwards."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _add_names(module)


class _TorchNpuLoader(importlib.abc.Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.npu = importlib.import_module("torch").npu  # type: ignore[attr-defined]


def _add_names(torch: Any) -> None:
    npu = _HostNpu()
    sys.modules["torch.npu"] = npu
    torch.npu = npu
    torch.Tensor.npu = _to_npu
    torch.Tensor.cpu = _to_cpu


def _to_npu(tensor: Any, device: object = None, non_blocking: bool = False) -> Any:
    return tensor.clone()


def _to_cpu(tensor: Any, *args: object, **kwargs: object) -> Any:
    return tensor.clone()


class _HostNpu(ModuleType):
    """``torch.npu``: as many devices as a script names, all of them this process's memory."""

    def __init__(self) -> None:
        super().__init__("torch.npu", "The host in the place of NPUs.")
        self._device = 0

    def set_device(self, device: object) -> None:
        """Takes 1, "npu:1", or a device."""
        if not isinstance(device, int | str):
            device = getattr(device, "index", 0)
        self._device = int(str(device).rpartition(":")[2])

    def current_device(self) -> int:
        return self._device

    def is_available(self) -> bool:
        return True

    def synchronize(self, device: object = None) -> None:
        """Host work is done when its call returns."""

    def empty_cache(self) -> None:
        """The host has none."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"torch.npu.{name} has no counterpart on the host; torch_npu is not installed"
        )
