"""``LLMDataDist``: the life cycle of the engine in this process, and its links.

Every method may be called from any thread, except ``finalize``, which ends the calls of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.datadist.cache_manager import CacheManager
from vllm_llmdd_connector.datadist.checks import (
    check,
    check_elements,
    check_int32,
    check_type,
    check_uint64,
)
from vllm_llmdd_connector.datadist.cluster_info import LLMClusterInfo, ip_text
from vllm_llmdd_connector.datadist.collective import check_comm_id, check_members
from vllm_llmdd_connector.datadist.first_links import FirstGenerationLinks
from vllm_llmdd_connector.datadist.kv_cache_manager import KvCacheManager
from vllm_llmdd_connector.datadist.link_use import LinkUse
from vllm_llmdd_connector.datadist.mutual_links import MutualLinks
from vllm_llmdd_connector.datadist.settings import EngineSettings, listen_address, read_settings
from vllm_llmdd_connector.datadist.status import (
    LLMException,
    LLMStatusCode,
    engine_errors,
    fail,
    first_generation_errors,
    status_of,
)
from vllm_llmdd_connector.datadist.types import LLMRole, RegisterMemStatus

__all__ = ["LLMDataDist"]

logger = logging.getLogger(__name__)

_LinkResult = tuple[LLMStatusCode, list[LLMStatusCode]]


class _Running:
    """What exists between ``init`` and ``finalize``."""

    def __init__(self, role: LLMRole, cluster_id: int, settings: EngineSettings) -> None:
        self.settings = settings
        self.owner_pid = os.getpid()
        with engine_errors("init"):
            self.engine = _engine.HostEngine(
                cluster_id,
                remote_access=settings.remote_access,
                sync_kv_timeout_ms=settings.sync_kv_timeout_ms,
                listen_ip=settings.listen_ip,
                listen_port=settings.listen_port,
                device_pool=settings.device_pool,
                host_pool=settings.host_pool,
                link_total_time_ms=settings.link_total_time_ms,
                link_retries=settings.link_retries,
                transport=settings.transport,
                link_secret=settings.link_secret,
                nixl_library=settings.nixl_library,
                staging_mib=settings.staging_mib,
                share_memory=settings.share_memory,
            )
        link_use = LinkUse()
        self.cache_manager = CacheManager(self.engine, settings.remote_access)
        self.kv_cache_manager = KvCacheManager(self.engine, role, link_use)
        self.first_links = FirstGenerationLinks(self.engine, link_use)
        self.mutual_links = MutualLinks(self.engine)

    def close(self) -> None:
        self.cache_manager.close()
        self.kv_cache_manager.close()
        self.engine.finalize()


class LLMDataDist:
    """One cluster of LLM-DataDist. At most one instance per process is initialised at a time."""

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        check_type("role", role, LLMRole)
        check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._running: _Running | None = None

    def init(self, options: dict[str, str]) -> None:
        """Start the engine. Without effect if this instance runs already.

        Raises ``LLM_FAILED`` if another instance of this process runs, or if the address of
        ``llm.listenIpInfo`` cannot be used.
        """
        with LLMDataDist._lock:
            if self._running is not None and self._running.owner_pid == os.getpid():
                return
            _abandon_foreign()
            if LLMDataDist.llm_engine_instance is not None:
                fail(
                    "another LLMDataDist of this process is initialised; finalize it first",
                    LLMStatusCode.LLM_FAILED,
                )
            settings = read_settings(options, self._role)
            self._running = _Running(self._role, self._cluster_id, settings)
            LLMDataDist.llm_engine_instance = self

    def finalize(self) -> None:
        """End all links and free everything. Without effect if not initialised."""
        with LLMDataDist._lock:
            running, self._running = self._running, None
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = None
        if running is not None:
            running.close()

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        return self._require_second("cache_manager").cache_manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        return self._require_first("kv_cache_manager").kv_cache_manager

    @property
    def listen_port(self) -> int:
        """The port this process listens on, 0 if it does not. An extension of the vendor's API.

        It tells the port that was picked when ``listen_ip_info`` named port 0.
        """
        with engine_errors("listen_port"):
            return self._require().engine.listen_port

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> _LinkResult:
        """Link to peers that listen; ``timeout`` in ms bounds the whole handshake with each.

        Returns the overall status (the last one that is not a success) and one status per
        cluster, in order. A failed link is not raised; ``last_link_error`` says why.
        """
        running = self._require()
        _check_link_arguments(clusters, timeout)
        if not clusters:
            return LLMStatusCode.LLM_PARAM_INVALID, []
        for cluster in clusters:
            _remote_id(cluster)
        if running.settings.first_generation:
            return running.first_links.link(self._role, clusters, timeout)
        for cluster in clusters:
            if running.settings.needs_local_ip:
                check(bool(cluster.local_ip_info_list), "local_ip_info_list is empty")
        targets = [_target(cluster) for cluster in clusters if _dialable(cluster)]
        with engine_errors("link_clusters"):
            began_s = running.mutual_links.begin()
            statuses = [_link_status(code) for code in running.engine.link(targets, timeout)]
            if running.settings.point_to_point:
                statuses = [
                    running.mutual_links.joined(target[0], status, began_s, timeout)
                    for target, status in zip(targets, statuses, strict=True)
                ]
        answers = iter(statuses)
        return _overall(
            [
                next(answers) if _dialable(cluster) else LLMStatusCode.LLM_PARAM_INVALID
                for cluster in clusters
            ]
        )

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> _LinkResult:
        """Drop links. Without ``force`` the peer is told and drops its end, too.

        ``force`` only drops the local end: for a peer that is dead, stopped or timed out.
        """
        running = self._require()
        _check_link_arguments(clusters, timeout)
        check_type("force", force, bool)
        if not clusters:
            return LLMStatusCode.LLM_PARAM_INVALID, []
        ids = [_remote_id(cluster) for cluster in clusters]
        if running.settings.first_generation:
            return running.first_links.unlink(clusters, timeout, force)
        with engine_errors("unlink_clusters"):
            running.mutual_links.end(ids)
            codes = running.engine.unlink(ids, timeout, force)
        return _overall([status_of(code) for code in codes])

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Start to link with all members that call this with the same name and mapping.

        Returns a comm id at once; poll ``query_register_mem_status`` until it says OK. Members meet
        in a directory of this user below TMPDIR, so they run on one host, and the rank table, whose
        addresses nobody dials here, is not read. What is registered afterwards is not remote
        accessible.
        """
        running = self._require_collective()
        members = check_members(comm_name, cluster_rank_info, rank_table)
        with engine_errors("link"):
            comm_id = running.engine.link_members(comm_name, members)
        running.cache_manager.set_is_call_linked()
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Drop this end of a ``link``, also while it is being set up."""
        running = self._require_collective()
        check_comm_id(comm_id)
        with engine_errors("unlink"):
            running.engine.unlink_members(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """How far a ``link`` is. ``last_link_error`` says why it FAILED."""
        running = self._require_collective()
        check_comm_id(comm_id)
        with engine_errors("query_register_mem_status"):
            return RegisterMemStatus(running.engine.comm_state(comm_id))

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        """Take another role, and listen at ``llm.listenIpInfo`` of the options, or nowhere.

        Raises ``LLM_EXIST_LINK`` while there is a link. Caches stay as they are.
        """
        running = self._require()
        check_type("role", role, LLMRole)
        options: Mapping[str, str] = {}
        if switch_options is not None:
            check_type("switch_options", switch_options, dict)
            check_elements("switch_options", switch_options.keys(), str)
            check_elements("switch_options", switch_options.values(), str)
            options = switch_options
        address = listen_address(options)
        settings = running.settings
        if settings.first_generation:
            self._check_first_switch(role, settings, address)
        if settings.point_to_point and address != (settings.listen_ip, settings.listen_port):
            fail(
                "the hixl backend keeps its listening address",
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        with engine_errors("switch_role"):
            running.engine.listen(*address)
        running.kv_cache_manager.switch_role(role)
        self._role = role

    def _check_first_switch(
        self, role: LLMRole, settings: EngineSettings, address: tuple[str, int]
    ) -> None:
        check(role != self._role, f"the role is {role} already")
        check(role != LLMRole.PROMPT or bool(address[0]), "a PROMPT needs llm.listenIpInfo")
        if not settings.may_switch_role:
            fail(
                "the role can be switched with LLMConfig.enable_switch_role = True only",
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )

    def last_link_error(self, cluster_id: int) -> str:
        """Why the last attempt to link or unlink with this cluster failed, as one sentence.

        Empty if it did not fail. Also tells of attempts that the peer made. An extension of the
        vendor's API, whose status codes cannot say what to do next.
        """
        check_uint64("cluster_id", cluster_id)
        with engine_errors("last_link_error"):
            return self._require().engine.last_link_error(cluster_id)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Raise unless the peer answers over the link (first generation only)."""
        running = self._require_first("check_link_status")
        check_uint64("remote_cluster_id", remote_cluster_id)
        with first_generation_errors("check_link_status"):
            running.engine.check_link(remote_cluster_id)

    def _require_collective(self) -> _Running:
        running = self._require_second("link")
        if running.settings.point_to_point:
            fail(
                "the hixl backend has link_clusters only",
                LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        return running

    def _require_first(self, what: str) -> _Running:
        running = self._require()
        check(running.settings.first_generation, f"{what} belongs to enable_cache_manager = False")
        return running

    def _require_second(self, what: str) -> _Running:
        running = self._require()
        check(
            not running.settings.first_generation,
            f"{what} belongs to enable_cache_manager = True",
        )
        return running

    def _require(self) -> _Running:
        running = self._running
        if running is None:
            raise RuntimeError("llm datadist is not initialized")
        return running


def _check_link_arguments(clusters: Sequence[LLMClusterInfo], timeout: int) -> None:
    check_type("clusters", clusters, list, tuple)
    check_elements("clusters", clusters, LLMClusterInfo)
    check_int32("timeout", timeout)
    check(timeout > 0, f"timeout must be above 0 ms, got {timeout}")


def _remote_id(cluster: LLMClusterInfo) -> int:
    check_uint64("remote_cluster_id", cluster.remote_cluster_id)
    assert cluster.remote_cluster_id is not None
    return cluster.remote_cluster_id


def _dialable(cluster: LLMClusterInfo) -> bool:
    return len(cluster.remote_ip_info_list) == 1


def _target(cluster: LLMClusterInfo) -> tuple[int, str, int, str]:
    ip, port = cluster.remote_ip_info_list[0]
    return _remote_id(cluster), ip_text(ip), port, cluster.link_secret


def _link_status(code: int) -> LLMStatusCode:
    """A link that was not made in time is one that failed; the sentence says why."""
    status = status_of(code)
    return LLMStatusCode.LLM_LINK_FAILED if status == LLMStatusCode.LLM_TIMEOUT else status


def _overall(statuses: list[LLMStatusCode]) -> _LinkResult:
    failures = [status for status in statuses if status != LLMStatusCode.LLM_SUCCESS]
    return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), statuses


def _abandon_foreign() -> None:
    """In a forked child: forget the parent's instance, whose threads do not exist here."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None or instance._running is None:
        return
    if instance._running.owner_pid != os.getpid():
        instance._running = None
        LLMDataDist.llm_engine_instance = None


@atexit.register
def _finalize_at_exit() -> None:
    instance = LLMDataDist.llm_engine_instance
    if instance is not None:
        with contextlib.suppress(LLMException):
            instance.finalize()
