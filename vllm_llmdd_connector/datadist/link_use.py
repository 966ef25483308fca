"""Which links of the first generation are moving data at the moment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LinkUse"]


class LinkUse:
    """Counts transfers per cluster, so that unlinking can say that a link is busy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Counter[int] = Counter()

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

    def busy(self, cluster_id: int) -> bool:
        with self._lock:
            return self._running[cluster_id] > 0
