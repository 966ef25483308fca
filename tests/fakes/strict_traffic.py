"""What the vendor's documentation forbids without refusing it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Traffic", "Violation"]


class Violation(BaseException):
    """The caller did what the vendor's documentation forbids."""


class Traffic:
    """Which calls run and which links were made, over the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: set[int] = set()
        self._pushes = 0
        self._alone = ""
        self._transfers: list[tuple[frozenset[int], Callable[[], bool]]] = []
        self.linked: set[int] = set()

    @contextlib.contextmanager
    def on_link(self, what: str, cluster_id: int, push: bool = False) -> Iterator[None]:
        with self._lock:
            self._check(what, {cluster_id}, push)
            self._busy.add(cluster_id)
            self._pushes += push
        try:
            yield
        finally:
            with self._lock:
                self._busy.discard(cluster_id)
                self._pushes -= push

    def transfer(
        self, what: str, cluster_ids: Iterable[int], start: Callable[[], Callable[[], bool]]
    ) -> None:
        """A layer-wise transfer, which uses its links until what ``start`` returns says that it has
        ended."""
        links = frozenset(cluster_ids)
        with self._lock:
            self._check(what, links, True)
            self._transfers.append((links, start()))

    def _check(self, what: str, links: Iterable[int], push: bool) -> None:
        self._transfers = [entry for entry in self._transfers if not entry[1]()]
        for cluster_id in links:
            if cluster_id in self._busy or any(cluster_id in used for used, _ in self._transfers):
                raise Violation(f"{what} beside another call on the link to {cluster_id:x}")
        if push and (self._pushes or self._transfers):
            raise Violation(f"{what} beside another transfer of this process")

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """First generation: the manager's calls exclude each other."""
        with self._lock:
            if self._alone:
                raise Violation(f"{what} beside {self._alone}")
            self._alone = what
        try:
            yield
        finally:
            with self._lock:
                self._alone = ""

    def check_idle(self, what: str) -> None:
        with self._lock:
            self._transfers = [entry for entry in self._transfers if not entry[1]()]
            busy = self._busy.union(*(links for links, _ in self._transfers))
            if busy:
                raise Violation(f"{what} beside calls on links {sorted(busy)}")

    def check_unlinked(self) -> None:
        if self.linked:
            raise Violation("memory registered after a link was made: no peer will see it")
