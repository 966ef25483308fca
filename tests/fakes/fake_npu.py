"""A stand-in for ``torch_npu``: one device, whose work is done when the test says so."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace
from typing import Any


class FakeNpu(ModuleType):
    """``torch_npu.npu``: its one stream is done when ``done`` is set."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.npu = self
        self.done = threading.Event()
        self.calls: list[str] = []

    def current_device(self) -> int:
        return 5

    def set_device(self, index: int) -> None:
        self.calls.append(f"set_device {index}")

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda: self.calls.append(f"record on {threading.current_thread().name}"),
            synchronize=lambda: (self.done.wait(20), self.calls.append("synchronized")),
            query=self.done.is_set,
        )
