"""Our engine under the vendor's name, with the vendor's restrictions enforced.

``tests/vendor/llm_datadist`` makes it importable as ``llm_datadist``. What the vendor's package
does not have or does worse is missing or worse here:

* no extension of ours: no port 0, no ``listen_port``, no ``last_link_error``, no status sentence,
  no reservations, no native synchronizer, no ``tensor_num_per_layer`` of a layer-wise transfer;
* unknown keyword arguments of pulls are ignored, ``None`` for an object is an ``AttributeError``;
* at most 240 addresses, device addresses on 2 MiB, IPv4 only;
* the timeout of ``link_clusters`` bounds the connect, and nothing after it;
* equal placeholders of one ``allocate_cache`` are refused; the first generation refuses a second
  ``deallocate_cache``, and calls a link request that was only refused a success.

What its documentation forbids without refusing it ends in a ``Violation``, which no caller expects:
memory registered after a link was made, two calls on one link at once, two pushes at once in a
process, two calls of the first generation's manager at once, ``finalize`` beside another call.

With ``STRICT_VENDOR_PLAIN_ENUM`` set, status codes are a plain ``Enum``, as before CANN 9.1.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (another user may not read it later)
import socket
from collections.abc import Sequence
from typing import Any

from fakes.strict_managers import CacheManager, KvCacheManager
from fakes.strict_status import LLMStatusCode, opaque
from fakes.strict_traffic import Traffic, Violation
from vllm_llmdd_connector import datadist as ours
from vllm_llmdd_connector.datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMClusterInfo,
    LLMRole,
    RegisterMemStatus,
)
from vllm_llmdd_connector.datadist.cluster_info import ip_text

__all__ = list(ours.__all__)

_FOR_EVER_MS = 2**31 - 1
_LISTEN = "llm.listenIpInfo"
_REFUSALS = ("LLM_ALREADY_LINK", "LLM_REPEAT_REQUEST", "LLM_PARAM_INVALID")
_Result = tuple[Any, list[Any]]


def __getattr__(name: str) -> Any:
    """The names of the package that do not differ."""
    if name in ours.__all__:
        return getattr(ours, name)
    raise AttributeError(f"module 'llm_datadist' has no attribute {name!r}")


class TransferWithCacheKeyConfig(ours.TransferWithCacheKeyConfig):
    """Without a token."""

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        super().__init__(cache_key, src_layer_range, dst_layer_range, src_batch_index)


class LLMDataDist:
    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._inner = ours.LLMDataDist(role, cluster_id)
        self._traffic = Traffic()
        self._manager: CacheManager | None = None
        self._first_manager: KvCacheManager | None = None

    @property
    def cluster_id(self) -> int:
        return self._inner.cluster_id

    @property
    def cache_manager(self) -> CacheManager:
        with opaque("cache_manager"):
            inner = self._inner.cache_manager
        if self._manager is None:
            self._manager = CacheManager(inner, self._traffic)
        return self._manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        with opaque("kv_cache_manager"):
            inner = self._inner.kv_cache_manager
        if self._first_manager is None:
            self._first_manager = KvCacheManager(inner, self._traffic)
        return self._first_manager

    def init(self, options: dict[str, str]) -> None:
        _check_port(options)
        with opaque("init"):
            self._inner.init(options)

    def finalize(self) -> None:
        self._traffic.check_idle("finalize")
        self._inner.finalize()
        self._traffic.linked.clear()
        self._manager = self._first_manager = None

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        with opaque("link"):
            return self._inner.link(comm_name, cluster_rank_info, rank_table)

    def unlink(self, comm_id: int) -> None:
        with opaque("unlink"):
            self._inner.unlink(comm_id)

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        with opaque("query_register_mem_status"):
            return self._inner.query_register_mem_status(comm_id)

    def check_link_status(self, remote_cluster_id: int) -> None:
        with opaque("check_link_status"):
            self._inner.check_link_status(remote_cluster_id)

    def switch_role(self, role: LLMRole, switch_options: dict[str, str] | None = None) -> None:
        _check_port(switch_options)
        with opaque("switch_role"):
            self._inner.switch_role(role, switch_options)

    def link_clusters(self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000) -> _Result:
        if self._is_first() or not _can_be_dialled(clusters, timeout):
            with opaque("link_clusters"):
                status, statuses = self._inner.link_clusters(clusters, timeout)
            refused = all(entry.name in ("LLM_SUCCESS", *_REFUSALS) for entry in statuses)
            if self._is_first() and statuses and refused:
                status = LLMStatusCode.LLM_SUCCESS
            return _named(status, statuses)
        statuses = [self._link(cluster, timeout) for cluster in clusters]
        failures = [code for code in statuses if code.name != "LLM_SUCCESS"]
        return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), statuses

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> _Result:
        if self._is_first() or not _can_be_dialled(clusters, timeout):
            with opaque("unlink_clusters"):
                return _named(*self._inner.unlink_clusters(clusters, timeout, force))
        statuses = []
        for cluster in clusters:
            assert cluster.remote_cluster_id is not None
            with (
                self._traffic.on_link("unlink", cluster.remote_cluster_id),
                opaque("unlink_clusters"),
            ):
                status, _ = self._inner.unlink_clusters([cluster], timeout, force)
            name = "LLM_SUCCESS" if status.name == "LLM_NOT_YET_LINK" else status.name
            if name == "LLM_SUCCESS":
                self._traffic.linked.discard(cluster.remote_cluster_id)
            statuses.append(LLMStatusCode[name])
        return statuses[-1], statuses

    def _link(self, cluster: LLMClusterInfo, timeout_ms: int) -> Any:
        if len(cluster.remote_ip_info_list) != 1:
            return LLMStatusCode.LLM_PARAM_INVALID
        ((ip, port),) = cluster.remote_ip_info_list
        assert cluster.remote_cluster_id is not None
        try:
            socket.create_connection((ip_text(ip), port), timeout_ms / 1000).close()
        except OSError:
            return LLMStatusCode.LLM_LINK_FAILED
        with self._traffic.on_link("link", cluster.remote_cluster_id), opaque("link_clusters"):
            status, _ = self._inner.link_clusters([cluster], _FOR_EVER_MS)
        if status.name == "LLM_SUCCESS":
            self._traffic.linked.add(cluster.remote_cluster_id)
        return LLMStatusCode[status.name]

    def _is_first(self) -> bool:
        return self._inner._require().settings.first_generation


def _check_port(options: object) -> None:
    address = options.get(_LISTEN) if isinstance(options, dict) else None
    if isinstance(address, str) and address.endswith(":0"):
        raise Violation("port 0 is an extension of ours")


def _can_be_dialled(clusters: object, timeout: object) -> bool:
    """Whether the arguments are right; else our engine shall say what is wrong."""
    return (
        isinstance(clusters, list | tuple)
        and len(clusters) > 0
        and all(
            isinstance(cluster, LLMClusterInfo)
            and cluster.remote_cluster_id is not None
            and cluster.local_ip_info_list
            for cluster in clusters
        )
        and isinstance(timeout, int)
        and 0 < timeout < 2**31
    )


def _named(status: Any, statuses: Sequence[Any]) -> _Result:
    return LLMStatusCode[status.name], [LLMStatusCode[entry.name] for entry in statuses]
