"""The extensions of the LLM-DataDist API for pushes, inside one process.

A transfer copies in the thread that waits for it, layer by layer, as the real engine does in its
own: each layer when its mark of the step is set, and only while the reservation is open.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakes.clock import PATIENCE_S


class FakeSynchronizer:
    """``NativeLayerSynchronizer``: marks belong to a step."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.step = FakeStep(num_layers)

    def mark(self, layer_index: int) -> None:
        self.step.mark([layer_index])

    def mark_all(self) -> None:
        self.step.mark(range(self._num_layers))

    def reset(self) -> None:
        ended, self.step = self.step, FakeStep(self._num_layers)
        ended.close()

    @property
    def marked(self) -> list[bool]:
        return list(self.step.marks)


class FakeStep:
    """One step's marks, which a transfer keeps to."""

    def __init__(self, num_layers: int) -> None:
        self.marks = [False] * num_layers
        self._is_over = False
        self._changed = threading.Condition()

    def mark(self, layers: Iterable[int]) -> None:
        with self._changed:
            for layer in layers:
                self.marks[layer] = True
            self._changed.notify_all()

    def close(self) -> None:
        """No layer will be marked any more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int) -> bool:
        """Whether the layer is marked at last."""
        with self._changed:
            self._changed.wait_for(lambda: self.marks[layer] or self._is_over, PATIENCE_S)
            return self.marks[layer]


@dataclass
class FakeReservation:
    """Blocks that a peer may write."""

    addresses: list[int]
    block_len: int
    blocks: list[int]
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by a copy; closing waits for it."""


class TransferConfig:
    """``TransferWithCacheKeyConfig``."""

    def __init__(
        self, cache_key: Any, src_layer_range: range, dst_layer_range: range, *, token: int
    ) -> None:
        self.cluster_id: int = cache_key.prompt_cluster_id
        self.layers = src_layer_range
        self.token = token


class FakeTask:
    """``CacheTask`` of one destination."""

    def __init__(
        self,
        addresses: Sequence[int],
        step: FakeStep,
        find: Callable[[], FakeReservation | None],
        src_blocks: Sequence[int],
        dst_positions: Sequence[int],
        codes: Any,
    ) -> None:
        self._addresses = addresses
        self._step = step
        self._find = find
        self._pairs = list(zip(src_blocks, dst_positions, strict=True))
        self._codes = codes

    def synchronize(self) -> Any:
        for layer, address in enumerate(self._addresses):
            if not self._step.wait(layer):
                return self._codes.LLM_PARAM_INVALID
            reservation = self._find()
            if reservation is None:
                return self._codes.LLM_KV_CACHE_NOT_EXIST
            with reservation.lock:
                if not reservation.is_open:
                    return self._codes.LLM_KV_CACHE_NOT_EXIST
                length = reservation.block_len
                for src, position in self._pairs:
                    dst = reservation.blocks[position]
                    target = reservation.addresses[layer] + dst * length
                    ctypes.memmove(target, address + src * length, length)
        return self._codes.LLM_SUCCESS
