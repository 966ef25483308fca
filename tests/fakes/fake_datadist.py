"""The LLM-DataDist API inside one process, with faults on demand.

``FakeDataDist.api`` has the names that ``vllm_llmdd_connector.worker`` uses of the host engine, so
it can stand where that expects the module; see ``install``. All engines made from one
``FakeDataDist`` can link to each other. A pull copies bytes between the registered addresses, like
the real engine, and checks keys, links and indices before it does. Pushes are in ``fake_push``.

What must not happen whatever the test does (a transfer or unlink beside ``finalize``) is noted in
``violations``; a test asserts at its end that there are none.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from fakes.fake_push import FakeSynchronizer, PushNetwork, PushSide, TransferWithCacheKeyConfig
from fakes.fake_types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

FIRST_PORT = 40000
"""Listening engines are given numbers from here on; no socket is opened."""


@dataclass
class Faults:
    """What goes wrong with one cluster as seen by those who link to it and pull from it."""

    num_link_failures: int = 0
    """So many links fail; counted down."""
    pull_status: LLMStatusCode | None = None
    """Pulls end with this code before they copy a byte."""
    num_pull_failures: int | None = None
    """So many pulls end with ``pull_status``; counted down. None: all of them."""
    pull_gate: threading.Event | None = None
    """Pulls wait for this event before they copy."""
    after_block: Callable[[int], None] | None = None
    """Called in a pull after each copied block with the number of blocks copied so far."""
    pull_started: threading.Event = field(default_factory=threading.Event)
    """Set when a pull begins, before it waits for ``pull_gate``."""


class PullCall(NamedTuple):
    """One pull that reached the engine."""

    local_cluster_id: int
    remote_cluster_id: int
    model_id: int
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]


class FakeDataDist(PushNetwork):
    """One network of engines; ``api`` stands for the module."""

    def __init__(self) -> None:
        super().__init__()
        self.engines: dict[int, FakeEngine] = {}
        """By cluster id; an engine that was killed or finalized is not in it."""
        self.pulls: list[PullCall] = []
        self.links: list[tuple[int, int]] = []
        """Every attempt to link, as local and remote cluster id."""
        self._faults: dict[int, Faults] = {}
        self._ports = itertools.count(FIRST_PORT)
        self._lock = threading.Lock()
        self.api = SimpleNamespace(
            LLMRole=LLMRole,
            DataType=DataType,
            LLMStatusCode=LLMStatusCode,
            LLMException=LLMException,
            LLMConfig=LLMConfig,
            LLMClusterInfo=LLMClusterInfo,
            CacheDesc=CacheDesc,
            BlocksCacheKey=BlocksCacheKey,
            NativeLayerSynchronizer=FakeSynchronizer,
            TransferWithCacheKeyConfig=TransferWithCacheKeyConfig,
            LLMDataDist=partial(FakeEngine, self),
        )
        """What stands for the module."""

    @property
    def producers(self) -> list[int]:
        """Cluster ids of the engines that listen, in the order of their start."""
        return [cluster_id for cluster_id, engine in self.engines.items() if engine.listen_port]

    @property
    def consumers(self) -> list[int]:
        """Cluster ids of the engines that do not listen."""
        return [cluster_id for cluster_id, engine in self.engines.items() if not engine.listen_port]

    def faults(self, cluster_id: int) -> Faults:
        """What goes wrong with this cluster from now on; change the fields at any time."""
        with self._lock:
            return self._faults.setdefault(cluster_id, Faults())

    def kill(self, cluster_id: int) -> None:
        """The process of this cluster is gone: links to it fail, pulls from it time out."""
        with self._lock:
            self.engines.pop(cluster_id)

    def num_pulls_from(self, cluster_id: int) -> int:
        return sum(call.remote_cluster_id == cluster_id for call in self.pulls)

    def start(self, engine: FakeEngine, listens: bool) -> int:
        """Put an engine on the network; returns its port, 0 when it does not listen."""
        with self._lock:
            if engine.cluster_id in self.engines:
                raise LLMException("cluster id in use", status_code=LLMStatusCode.LLM_FAILED)
            self.engines[engine.cluster_id] = engine
            return next(self._ports) if listens else 0

    def stop(self, engine: FakeEngine) -> None:
        with self._lock:
            if self.engines.get(engine.cluster_id) is engine:
                del self.engines[engine.cluster_id]

    def takes_link(self, cluster: LLMClusterInfo) -> str:
        """Why a link to this cluster fails now; empty when it does not."""
        faults = self.faults(cluster.remote_cluster_id)
        with self._lock:
            if faults.num_link_failures:
                faults.num_link_failures -= 1
                return "scripted link failure"
            peer = self.engines.get(cluster.remote_cluster_id)
            if peer is None:
                return "connection refused"
            ports = [port for _, port in cluster.remote_ip_info]
            return "" if ports == [peer.listen_port] else f"nobody listens on {ports}"

    def takes_pull(self, cluster_id: int) -> LLMStatusCode | None:
        """With which code a pull from this cluster fails now, or None."""
        faults = self.faults(cluster_id)
        with self._lock:
            if faults.num_pull_failures == 0:
                return None
            if faults.pull_status is not None and faults.num_pull_failures is not None:
                faults.num_pull_failures -= 1
            return faults.pull_status


class FakeEngine(PushSide):
    """One ``LLMDataDist``, and its cache manager."""

    def __init__(self, network: FakeDataDist, role: LLMRole, cluster_id: int) -> None:
        super().__init__(network, cluster_id)
        self._network: FakeDataDist = network
        self.role = role
        self.options: dict[str, Any] = {}
        self.listen_port = 0
        self._link_errors: dict[int, str] = {}
        self._running: list[int] = []
        self._is_finalized = False

    @property
    def cache_manager(self) -> FakeEngine:
        return self

    def init(self, options: dict[str, Any]) -> None:
        self.options = options
        self.listen_port = self._network.start(self, bool(options["listen_ip_info"]))

    def finalize(self) -> None:
        if self._running:
            self._network.violations.append(f"{self.cluster_id:x}: finalize beside a pull")
        self._is_finalized = True
        self._network.stop(self)
        self.end_pushes()

    def link_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        codes = [self._link(cluster) for cluster in clusters]
        failed = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
        return (failed[0] if failed else LLMStatusCode.LLM_SUCCESS), codes

    def unlink_clusters(
        self, clusters: Sequence[LLMClusterInfo], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        codes = []
        for cluster in clusters:
            if cluster.remote_cluster_id in self._running:
                self._network.violations.append(f"{self.cluster_id:x}: unlink beside a pull")
            if self._is_finalized:
                self._network.violations.append(f"{self.cluster_id:x}: unlink after finalize")
            was_linked = cluster.remote_cluster_id in self.linked
            self.linked.discard(cluster.remote_cluster_id)
            codes.append(
                LLMStatusCode.LLM_SUCCESS if was_linked else LLMStatusCode.LLM_NOT_YET_LINK
            )
        return max(codes), codes

    def last_link_error(self, cluster_id: int) -> str:
        return self._link_errors.get(cluster_id, "")

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey,
        remote_accessible: bool | None = None,
    ) -> Cache:
        if len(addrs) != cache_desc.num_tensors or blocks_cache_key in self.caches:
            raise LLMException(
                f"cannot register {blocks_cache_key}", status_code=LLMStatusCode.LLM_PARAM_INVALID
            )
        cache = Cache(len(self.caches) + 1, cache_desc, [list(addrs)])
        self.caches[blocks_cache_key] = cache
        return cache

    def pull_blocks(
        self,
        src_cache_key: BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        *,
        tensor_num_per_layer: int = 2,
    ) -> None:
        cluster_id = src_cache_key.prompt_cluster_id
        call = PullCall(
            self.cluster_id,
            cluster_id,
            src_cache_key.model_id,
            tuple(src_blocks),
            tuple(dst_blocks),
        )
        self._network.pulls.append(call)
        if self._is_finalized:
            self._network.violations.append(f"{self.cluster_id:x}: pull after finalize")
        self._running.append(cluster_id)
        try:
            self._pull(src_cache_key, dst_cache, call, self._network.faults(cluster_id))
        finally:
            self._running.remove(cluster_id)

    def _link(self, cluster: LLMClusterInfo) -> LLMStatusCode:
        remote = cluster.remote_cluster_id
        self._network.links.append((self.cluster_id, remote))
        if remote in self.linked:
            self._link_errors[remote] = "already linked"
            return LLMStatusCode.LLM_ALREADY_LINK
        problem = self._network.takes_link(cluster)
        if problem:
            self._link_errors[remote] = problem
            return LLMStatusCode.LLM_LINK_FAILED
        self.linked.add(remote)
        return LLMStatusCode.LLM_SUCCESS

    def _pull(self, key: BlocksCacheKey, dst: Cache, call: PullCall, faults: Faults) -> None:
        faults.pull_started.set()
        if faults.pull_gate is not None:
            faults.pull_gate.wait()
        status = self._network.takes_pull(call.remote_cluster_id)
        if status is not None:
            raise LLMException("scripted pull failure", status_code=status)
        if call.remote_cluster_id not in self.linked:
            raise LLMException("not linked", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        src = self._source(key)
        _check_blocks(call, src.cache_desc, dst.cache_desc)
        num_copied = 0
        for src_base, dst_base in zip(
            src.per_device_tensor_addrs[0], dst.per_device_tensor_addrs[0], strict=True
        ):
            for src_block, dst_block in zip(call.src_blocks, call.dst_blocks, strict=True):
                self._source(key)
                length = dst.cache_desc.block_len
                ctypes.memmove(dst_base + dst_block * length, src_base + src_block * length, length)
                num_copied += 1
                if faults.after_block is not None:
                    faults.after_block(num_copied)

    def _source(self, key: BlocksCacheKey) -> Cache:
        peer = self._network.engines.get(key.prompt_cluster_id)
        if peer is None:
            raise LLMException("the peer is gone", status_code=LLMStatusCode.LLM_TIMEOUT)
        cache = peer.caches.get(key)
        if cache is None:
            raise LLMException(f"no {key}", status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        return cache


def _check_blocks(call: PullCall, src: CacheDesc, dst: CacheDesc) -> None:
    """What the real engine refuses, this one refuses too."""
    problem = ""
    if not call.dst_blocks or len(call.src_blocks) != len(call.dst_blocks):
        problem = f"{len(call.src_blocks)} source and {len(call.dst_blocks)} destination blocks"
    elif src.block_len != dst.block_len or src.num_tensors != dst.num_tensors:
        problem = f"block_len or tensors differ: {src} and {dst}"
    for side, blocks, desc in (
        ("source", call.src_blocks, src),
        ("destination", call.dst_blocks, dst),
    ):
        for block in blocks:
            if not 0 <= block < desc.num_blocks:
                problem = f"{side} block {block} is outside [0, {desc.num_blocks})"
    if problem:
        raise LLMException(problem, status_code=LLMStatusCode.LLM_PARAM_INVALID)
