"""Which links of the first generation are moving data at the moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from vllm_llmdd_connector.datadist import _engine

__all__ = ["LinkUse"]


class LinkUse:
    """Counts transfers per cluster, so that unlinking can say that a link is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()
        self._tasks: list[tuple[frozenset[int], _engine.LayerTask]] = []

    @contextmanager
    def transfer(self, cluster_id: int) -> Iterator[None]:
        with self._lock:
            self._running[cluster_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[cluster_id] -= 1
                self._running += Counter()  # drops what is 0

    def add_task(self, cluster_ids: Iterable[int], task: _engine.LayerTask) -> None:
        """A layer-wise transfer uses the links to all its destinations until it has ended."""
        with self._lock:
            self._drop_ended()
            self._tasks.append((frozenset(cluster_ids), task))

    def busy(self, cluster_id: int) -> bool:
        with self._lock:
            self._drop_ended()
            return self._running[cluster_id] > 0 or any(
                cluster_id in cluster_ids for cluster_ids, _ in self._tasks
            )

    def _drop_ended(self) -> None:
        self._tasks = [entry for entry in self._tasks if not entry[1].wait(0)]
