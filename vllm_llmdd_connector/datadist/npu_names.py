"""The few names of ``torch_npu`` that scripts for ``llm_datadist`` use, meaning the host.

Active only after ``install`` and only where torch_npu is not installed. torch itself is imported
when the script does it. A tensor "on the NPU" is a copy in host memory; ``cpu()`` copies it back,
because a script expects its CPU copy to stay as it was when it pulls into the other one. Where a
device can be named, "npu" and "npu:1" mean host memory.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
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


# Functions of torch that make a tensor on a device.
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like"),
    *("randperm", "tensor", "zeros", "zeros_like"),
)


def _add_names(torch: Any) -> None:
    npu = _HostNpu()
    # Without a name for its extension point torch cannot read torch.device("npu").
    torch.utils.rename_privateuse1_backend("npu")
    # With the name alone torch cannot tell which accelerator is there, and raises; a barrier asks.
    torch._C._get_accelerator = lambda *check: torch.device("cpu")
    sys.modules["torch.npu"] = npu
    torch.npu = npu
    for name in _FACTORIES:
        setattr(torch, name, _on_host(getattr(torch, name)))
    torch.Tensor.to = _moved_to_host(torch.Tensor.to)
    torch.Tensor.npu = _to_npu
    torch.Tensor.cpu = _to_cpu


def _is_npu(device: object) -> bool:
    kind = device if isinstance(device, str) else getattr(device, "type", "")
    return isinstance(kind, str) and kind.partition(":")[0] == "npu"


def _on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_npu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def _moved_to_host(to: Callable[..., Any]) -> Callable[..., Any]:
    """A move to the NPU is a copy, as ``npu()`` is."""

    @functools.wraps(to)
    def move(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_is_npu(kwargs.get("device")) or (args and _is_npu(args[0]))):
            return to(tensor, *args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        else:
            args = ("cpu", *args[1:])
        return to(tensor, *args, **{**kwargs, "copy": True})

    return move


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
