"""What the worker reports: exactly one terminal result per request that vLLM waits for.

Filled by transfer threads, drained by the worker's main thread once per step. A second result for
an id, or one that nobody waits for, would be an assertion in vLLM's engine core, so it stops here.
"""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class Drained:
    """Results since the last call."""

    received: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Request id to reason; vLLM lets such a request recompute or fail."""
    failed_blocks: set[int] = field(default_factory=set)
    """The failed requests' blocks, where there is one KV cache group."""


class Completions:
    """Requests that are being received, and their results."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[int]] = {}
        self._cancelled: set[str] = set()
        self._drained = Drained()
        self._has_results = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def expect(self, request_id: str, loaded_blocks: list[int]) -> None:
        """vLLM holds blocks for this request until it is reported."""
        with self._lock:
            self._waiting[request_id] = loaded_blocks

    def cancel(self, request_id: str) -> None:
        """The request was aborted: it needs a report still, but no data."""
        with self._lock:
            if request_id in self._waiting:
                self._cancelled.add(request_id)

    def is_cancelled(self, request_id: str) -> bool:
        return request_id in self._cancelled

    def succeed(self, request_id: str) -> None:
        """The blocks are valid."""
        with self._lock:
            if self._waiting.pop(request_id, None) is not None:
                self._cancelled.discard(request_id)
                self._drained.received.add(request_id)
                self._has_results = True

    def fail(self, request_id: str, reason: str) -> None:
        """The blocks are not valid. An aborted request is reported as received: nobody reads it."""
        with self._lock:
            blocks = self._waiting.pop(request_id, None)
            if blocks is None:
                return
            self._has_results = True
            if request_id in self._cancelled:
                self._cancelled.discard(request_id)
                self._drained.received.add(request_id)
            else:
                self._drained.failed[request_id] = reason
                self._drained.failed_blocks.update(blocks)

    def drain(self) -> Drained | None:
        """The results since the last call, None if there are none."""
        if not self._has_results:
            return None
        with self._lock:
            drained, self._drained = self._drained, Drained()
            self._has_results = False
        return drained
