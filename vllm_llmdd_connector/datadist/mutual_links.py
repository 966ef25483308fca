"""Links of the backend ``hixl``, where each side links for itself before it transfers.

Two processes of this engine share one link, whoever made it. So the second side joins the first
one's, and only a side that links twice is told that there is a link already.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.status import LLMStatusCode

__all__ = ["MutualLinks"]

_PAUSE_S = 0.005


class MutualLinks:
    """The clusters that this process has linked to."""

    def __init__(self, engine: _engine.HostEngine) -> None:
        self._engine = engine
        self._own: set[int] = set()

    def begin(self) -> float:
        """Before links are made: what has ended since counts no more. Returns when it began."""
        self._own = {cluster_id for cluster_id in self._own if self._engine.linked(cluster_id)}
        return time.monotonic()

    def end(self, cluster_ids: Iterable[int]) -> None:
        """They are to be unlinked, which ends both directions."""
        self._own.difference_update(cluster_ids)

    def joined(
        self, cluster_id: int, status: LLMStatusCode, began_s: float, timeout_ms: int
    ) -> LLMStatusCode:
        """What becomes of the status of a link that was asked for."""
        if status == LLMStatusCode.LLM_ALREADY_LINK and cluster_id not in self._own:
            # When both sides dial at once, one of them can know that before it has the link.
            while not self._engine.linked(cluster_id):
                if time.monotonic() - began_s >= timeout_ms / 1000:
                    return LLMStatusCode.LLM_LINK_FAILED
                time.sleep(_PAUSE_S)
            status = LLMStatusCode.LLM_SUCCESS
        if status == LLMStatusCode.LLM_SUCCESS:
            self._own.add(cluster_id)
        return status
