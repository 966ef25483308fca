"""Synchronizers and destinations for the tests of `transfer_cache_async`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contract.cluster import Cluster
from contract.peer import Peer

Side = Cluster | Peer
ROW = 256
BLOCK = 64


def recorder(api: Any, answer: Callable[[int], Any] = lambda layer: True) -> Any:
    """A synchronizer that keeps its arguments in `calls`."""

    class Recorder(api.LayerSynchronizer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.calls: list[tuple[int, int | None]] = []

        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> Any:
            self.calls.append((layer_index, timeout_in_millis))
            return answer(layer_index)

        def layers(self) -> list[int]:
            return [layer for layer, _ in self.calls]

    return Recorder()


class Held:
    """A synchronizer's answer that waits for `release`, from layer `first` on."""

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._released = threading.Event()
        self.reached = threading.Event()

    def __call__(self, layer: int) -> bool:
        if layer >= self._first:
            self.reached.set()
            self._released.wait()
        return True

    def release(self) -> None:
        self._released.set()


@dataclass
class Destination:
    """A cache of cluster `cluster_id`, named as the mode wants it."""

    api: Any
    remote: bool
    cluster_id: int
    cache_id: int
    addrs: list[int]
    is_blocks: bool

    def config(
        self, src: range, first: int | None = None, row: int = 0, src_row: int = 0, **options: Any
    ) -> Any:
        """`src` layers of the source go to the layers from `first` on."""
        first = src.start if first is None else first
        if self.remote:
            key = (
                self.api.BlocksCacheKey(self.cluster_id)
                if self.is_blocks
                else self.api.CacheKeyByIdAndIndex(self.cluster_id, self.cache_id, row)
            )
            layers = range(first, first + len(src))
            return self.api.TransferWithCacheKeyConfig(key, src, layers, src_row, **options)
        bases = self.addrs[2 * first : 2 * (first + len(src))]
        addrs = [base + row * ROW for base in bases]
        return self.api.TransferConfig(self.cluster_id, addrs, src, src_row)


def rows_of(api: Any, remote: bool, cluster_id: int, side: Side, **options: Any) -> Destination:
    cache = side.add_rows(row_bytes=ROW, **options)
    return Destination(api, remote, cluster_id, cache, side.addrs(cache), False)


def blocks_of(api: Any, remote: bool, cluster_id: int, side: Side, **options: Any) -> Destination:
    cache = side.add_blocks(block_bytes=BLOCK, **options)
    return Destination(api, remote, cluster_id, cache, side.addrs(cache), True)
