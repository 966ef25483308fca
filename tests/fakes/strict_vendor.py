"""Our engine under the vendor's name, with the vendor's restrictions enforced.

``tests/vendor/llm_datadist.py`` makes it importable as ``llm_datadist``. What the vendor's package
does not have or does worse is missing or worse here:

* no extension of ours: no port 0, no ``listen_port``, no ``last_link_error``, no status sentence;
* unknown keyword arguments of pulls are ignored, ``None`` for an object is an ``AttributeError``;
* at most 240 addresses, device addresses on 2 MiB, IPv4 only;
* the timeout of ``link_clusters`` bounds the connect, and nothing after it.

What its documentation forbids without refusing it ends in a ``Violation``, which no caller expects:
memory registered after a link was made, two calls on one link at once, two pushes at once in a
process, ``finalize`` beside another call.

With ``STRICT_VENDOR_PLAIN_ENUM`` set, status codes are a plain ``Enum``, as before CANN 9.1.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from typing import Any

from vllm_llmdd_connector import datadist as ours
from vllm_llmdd_connector.datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMRole,
    Placement,
)
from vllm_llmdd_connector.datadist.cluster_info import ip_text

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "Placement",
]

MAX_ADDRESSES = 240
ALIGNMENT = 2 << 20
_FOR_EVER_MS = 2**31 - 1
_PULL_OPTIONS = ("src_layer_range", "dst_layer_range", "tensor_num_per_layer")

_codes = {code.name: code.value for code in ours.LLMStatusCode}
LLMStatusCode: Any = (
    Enum("LLMStatusCode", _codes)
    if os.environ.get("STRICT_VENDOR_PLAIN_ENUM")
    else IntEnum("LLMStatusCode", _codes)
)


class Violation(BaseException):
    """The caller did what the vendor's documentation forbids."""


class LLMException(RuntimeError):
    def __init__(self, *args: object, status_code: Any = LLMStatusCode.LLM_SUCCESS) -> None:
        super().__init__(*args)
        self._status_code = status_code

    @property
    def status_code(self) -> Any:
        return self._status_code


def _refuse(tag: str, name: str = "LLM_PARAM_INVALID") -> Any:
    code = LLMStatusCode[name]
    raise LLMException(f"[{tag}] failed, error code is {code}", status_code=code) from None


@contextlib.contextmanager
def _opaque(tag: str) -> Iterator[None]:
    """Our exceptions without the sentence that says what to do."""
    try:
        yield
    except ours.LLMException as error:
        _refuse(tag, error.status_code.name)


def _not_none(*values: object) -> None:
    for value in values:
        if value is None:
            raise AttributeError("'NoneType' object has no attribute '_value'")


class _Traffic:
    """Which calls run, over the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[int] = set()
        self._pushes = 0
        self.was_linked = False

    @contextlib.contextmanager
    def on_link(self, what: str, cluster_id: int, push: bool = False) -> Iterator[None]:
        with self._lock:
            if cluster_id in self._links:
                raise Violation(f"{what} beside another call on the link to {cluster_id:x}")
            if push and self._pushes:
                raise Violation(f"{what} beside another transfer of this process")
            self._links.add(cluster_id)
            self._pushes += push
        try:
            yield
        finally:
            with self._lock:
                self._links.discard(cluster_id)
                self._pushes -= push

    def check_idle(self, what: str) -> None:
        with self._lock:
            if self._links:
                raise Violation(f"{what} beside calls on links {sorted(self._links)}")


class LLMDataDist:
    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        self._inner = ours.LLMDataDist(role, cluster_id)
        self._traffic = _Traffic()
        self._manager = _Manager(self._inner, self._traffic)

    @property
    def cluster_id(self) -> int:
        return self._inner.cluster_id

    @property
    def cache_manager(self) -> _Manager:
        return self._manager

    def init(self, options: dict[str, str]) -> None:
        if options.get("llm.listenIpInfo", "").endswith(":0"):
            raise Violation("port 0 is an extension of ours")
        with _opaque("init"):
            self._inner.init(options)

    def finalize(self) -> None:
        self._traffic.check_idle("finalize")
        self._inner.finalize()

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[Any, list[Any]]:
        statuses = [self._link(cluster, timeout) for cluster in clusters]
        failures = [code for code in statuses if code is not LLMStatusCode.LLM_SUCCESS]
        return (failures[-1] if failures else LLMStatusCode.LLM_SUCCESS), statuses

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[Any, list[Any]]:
        statuses = []
        for cluster in clusters:
            assert cluster.remote_cluster_id is not None
            with (
                self._traffic.on_link("unlink", cluster.remote_cluster_id),
                _opaque("unlink_clusters"),
            ):
                status, _ = self._inner.unlink_clusters([cluster], timeout, force)
            name = "LLM_SUCCESS" if status.name == "LLM_NOT_YET_LINK" else status.name
            statuses.append(LLMStatusCode[name])
        return statuses[-1], statuses

    def _link(self, cluster: LLMClusterInfo, timeout_ms: int) -> Any:
        ((ip, port),) = cluster.remote_ip_info_list
        assert cluster.remote_cluster_id is not None
        try:
            socket.create_connection((ip_text(ip), port), timeout_ms / 1000).close()
        except OSError:
            return LLMStatusCode.LLM_LINK_FAILED
        with self._traffic.on_link("link", cluster.remote_cluster_id), _opaque("link_clusters"):
            status, _ = self._inner.link_clusters([cluster], _FOR_EVER_MS)
        self._traffic.was_linked |= status.name == "LLM_SUCCESS"
        return LLMStatusCode[status.name]


class _Manager:
    """``CacheManager``."""

    def __init__(self, inner: ours.LLMDataDist, traffic: _Traffic) -> None:
        self._inner = inner
        self._traffic = traffic
        self._num_addresses = 0

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        _not_none(cache_desc, addrs)
        if self._traffic.was_linked:
            raise Violation("memory registered after a link was made: no peer will see it")
        self._num_addresses += len(addrs)
        misaligned = cache_desc.placement == Placement.DEVICE and any(a % ALIGNMENT for a in addrs)
        if self._num_addresses > MAX_ADDRESSES or misaligned:
            _refuse("register_blocks_cache", "LLM_FAILED")
        with _opaque("register_blocks_cache"):
            return self._inner.cache_manager.register_blocks_cache(
                cache_desc, addrs, blocks_cache_key, remote_accessible
            )

    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        _not_none(src_cache_key, dst_cache, src_blocks, dst_blocks)
        options = {name: kwargs[name] for name in _PULL_OPTIONS if name in kwargs}
        with self._traffic.on_link("pull", src_cache_key.cluster_id), _opaque("pull_blocks"):
            self._inner.cache_manager.pull_blocks(
                src_cache_key, dst_cache, src_blocks, dst_blocks, **options
            )

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        _not_none(dst_cache_key, src_cache, src_blocks, dst_blocks)
        with (
            self._traffic.on_link("push", dst_cache_key.cluster_id, push=True),
            _opaque("push_blocks"),
        ):
            self._inner.cache_manager.push_blocks(
                dst_cache_key,
                src_cache,
                src_blocks,
                dst_blocks,
                src_layer_range,
                dst_layer_range,
                tensor_num_per_layer,
            )
