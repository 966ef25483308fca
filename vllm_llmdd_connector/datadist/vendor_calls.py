"""Calls into the vendor's package: one that may never return, and those that exclude each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["LinksInUse", "VendorCall"]


class VendorCall:
    """A call in a thread of its own, which may be abandoned."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="llmdd-vendor-link", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call has returned."""
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        """What a finished call returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()


class LinksInUse:
    """One call at a time on each link. Every call is bounded by the package's own timeouts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_use: set[int] = set()

    @contextlib.contextmanager
    def use(self, cluster_id: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: cluster_id not in self._in_use)
            self._in_use.add(cluster_id)
        try:
            yield
        finally:
            with self._changed:
                self._in_use.discard(cluster_id)
                self._changed.notify_all()

    def any_in_use(self) -> bool:
        with self._changed:
            return bool(self._in_use)
