"""``CacheTask``: what became of a layer-wise transfer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.checks import check_uint32
from vllm_llmdd_connector.datadist.status import LLMStatusCode, engine_errors, status_of

__all__ = ["CacheTask", "LayerTime"]

# One wait of the engine, so that Ctrl-C is heard.
_SLICE_MS = 500


class LayerTime(NamedTuple):
    """One layer that has arrived at one destination; nanoseconds as of ``time.monotonic_ns``."""

    config_index: int
    """Of the transfer's configs."""
    layer_index: int
    """In the source cache."""
    started_ns: int
    acknowledged_ns: int


class CacheTask:
    """Made by ``transfer_cache_async``. Neither method cancels; both may be called repeatedly.

    The transfer goes on when this object is dropped, and ends with the ``LLMDataDist``.
    """

    def __init__(
        self,
        task: _engine.LayerTask,
        to_status: Callable[[int], LLMStatusCode] = status_of,
    ) -> None:
        self._task = task
        self._to_status = to_status  # the generations name some codes differently
        self._timeout_status = to_status(LLMStatusCode.LLM_TIMEOUT)

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """The first failure of any destination, else ``LLM_SUCCESS``; ``LLM_TIMEOUT`` while the
        transfer runs. ``None`` waits for ever."""
        if not self._wait(timeout_in_millis):
            return self._timeout_status
        failures = [
            status
            for status in self._results()
            if status is not None and status != LLMStatusCode.LLM_SUCCESS
        ]
        return failures[0] if failures else LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """One status per config, in order; ``None`` for one that was not decided because the
        transfer ended early. While the transfer runs, each is ``LLM_TIMEOUT``."""
        if not self._wait(timeout_in_millis):
            return [self._timeout_status for _ in self._results()]
        return self._results()

    def layer_times(self) -> list[LayerTime]:
        """Extension: the layers that have arrived so far, in the order in which they were sent."""
        with engine_errors("CacheTask"):
            return [LayerTime(*time) for time in self._task.layer_times()]

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is not None:
            check_uint32("timeout_in_millis", timeout_in_millis)
        start = time.monotonic()
        with engine_errors("CacheTask"):
            while True:
                left = _left_ms(timeout_in_millis, start)
                if self._task.wait(min(left, _SLICE_MS)):
                    return True
                if left <= _SLICE_MS:
                    return False

    def _results(self) -> list[LLMStatusCode | None]:
        with engine_errors("CacheTask"):
            return [
                None if code is None else self._to_status(code) for code in self._task.results()
            ]


def _left_ms(timeout_in_millis: int | None, start: float) -> int:
    if timeout_in_millis is None:
        return 2 * _SLICE_MS
    return max(0, timeout_in_millis - int((time.monotonic() - start) * 1000))
