"""Link rules of the first generation: a DECODER links, a PROMPT listens.

Used by ``LLMDataDist``. Nothing here raises for what a peer does: statuses are returned.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.cluster_info import LLMClusterInfo, ip_text
from vllm_llmdd_connector.datadist.link_use import LinkUse
from vllm_llmdd_connector.datadist.status import (
    LLMStatusCode,
    first_generation_errors,
    first_generation_status,
)
from vllm_llmdd_connector.datadist.types import LLMRole

__all__ = ["FirstGenerationLinks"]

_MAX_CLUSTERS = 16
_OK = LLMStatusCode.LLM_SUCCESS
_INVALID = LLMStatusCode.LLM_PARAM_INVALID
#: What leaves the overall status of ``unlink_clusters`` a success.
_UNLINKED = (_OK, LLMStatusCode.LLM_NOT_YET_LINK)
_Result = tuple[LLMStatusCode, list[LLMStatusCode]]


class FirstGenerationLinks:
    """``link_clusters`` and ``unlink_clusters`` of one process; one of them runs at a time."""

    def __init__(self, engine: _engine.HostEngine, link_use: LinkUse) -> None:
        self._engine = engine
        self._link_use = link_use
        self._running = threading.Lock()
        self._addresses: dict[int, list[tuple[int, int]]] = {}  # of the links made here

    def link(self, role: LLMRole, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> _Result:
        """The overall status is a success or the first failure of the list."""
        if role != LLMRole.DECODER or not _fit(clusters):
            return _INVALID, []
        if len(clusters) > _MAX_CLUSTERS:
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT, []
        if not self._running.acquire(blocking=False):
            return LLMStatusCode.LLM_PROCESSING_LINK, []
        try:
            return self._link(clusters, timeout_ms)
        finally:
            self._running.release()

    def _link(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int) -> _Result:
        first = {_id(cluster): cluster for cluster in reversed(clusters)}
        wanted = [cluster for cluster in clusters if first[_id(cluster)] is cluster]
        targets = []
        for cluster in wanted:
            ip, port = cluster.remote_ip_info_list[0]
            targets.append((_id(cluster), ip_text(ip), port, cluster.link_secret))
        with first_generation_errors("link_clusters"):
            codes = self._engine.link(targets, timeout_ms)
        answers = {
            id(cluster): first_generation_status(code)
            for cluster, code in zip(wanted, codes, strict=True)
        }
        for cluster in wanted:
            if answers[id(cluster)] == _OK:
                self._addresses[_id(cluster)] = list(cluster.remote_ip_info_list)
        statuses = [
            answers.get(id(cluster), LLMStatusCode.LLM_REPEAT_REQUEST) for cluster in clusters
        ]
        failures = [status for status in statuses if status != _OK]
        return _link_overall(failures), statuses

    def unlink(self, clusters: Sequence[LLMClusterInfo], timeout_ms: int, force: bool) -> _Result:
        """Without ``force`` the peer is told; this end is dropped even if it does not answer."""
        if not self._running.acquire(blocking=False):
            return LLMStatusCode.LLM_PROCESSING_LINK, []
        try:
            statuses = [self._unlink(cluster, timeout_ms, force) for cluster in clusters]
        finally:
            self._running.release()
        done = all(status in _UNLINKED for status in statuses)
        return (_OK if done else LLMStatusCode.LLM_UNLINK_FAILED), statuses

    def _unlink(self, cluster: LLMClusterInfo, timeout_ms: int, force: bool) -> LLMStatusCode:
        cluster_id = _id(cluster)
        with first_generation_errors("unlink_clusters"):
            if not self._engine.linked(cluster_id):
                return LLMStatusCode.LLM_NOT_YET_LINK
            known = self._addresses.get(cluster_id, cluster.remote_ip_info_list)
            if known != cluster.remote_ip_info_list:
                return _INVALID
            if self._link_use.busy(cluster_id):
                return LLMStatusCode.LLM_LINK_BUSY
            (code,) = self._engine.unlink([cluster_id], timeout_ms, force)
            status = first_generation_status(code)
            if status != _OK:
                self._engine.unlink([cluster_id], timeout_ms, True)
                status = LLMStatusCode.LLM_NOTIFY_PROMPT_UNLINK_FAILED
        self._addresses.pop(cluster_id, None)
        return status


def _id(cluster: LLMClusterInfo) -> int:
    assert cluster.remote_cluster_id is not None  # checked by the caller
    return cluster.remote_cluster_id


def _fit(clusters: Sequence[LLMClusterInfo]) -> bool:
    """One device: one address on both sides, and the same own address for all clusters."""
    own = {tuple(cluster.local_ip_info_list) for cluster in clusters}
    return len(own) == 1 and all(
        len(cluster.local_ip_info_list) == 1 and len(cluster.remote_ip_info_list) == 1
        for cluster in clusters
    )


def _link_overall(failures: list[LLMStatusCode]) -> LLMStatusCode:
    """What a peer or the network did is a failed link; else the first refusal.

    The vendor's overall status stays a success when only refusals are in the list.
    """
    failed = (LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT)
    if any(status in failed for status in failures):
        return LLMStatusCode.LLM_LINK_FAILED
    return failures[0] if failures else _OK
