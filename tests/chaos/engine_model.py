"""The LLM-DataDist engines of a world: links, pulls and pushes that take virtual time.

The API, its checks and the bookkeeping of what must never happen are those of the threaded fake.
What differs is how a copy goes on: block by block in the name of D's process, only while the
reservation is open and P's memory is there, so that anything may happen between two blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from fakes.fake_datadist import FakeDataDist, FakeEngine, Faults, PullCall, _check_blocks
from fakes.fake_push import PushCall, Reservation
from fakes.fake_types import BlocksCacheKey, Cache, LLMClusterInfo, LLMException, LLMStatusCode
from hub import Hub, Process
from sim_threads import SimEvent

HOP_S = 0.00005
"""A message between two engines."""
CHECK_S = 0.02
"""How soon the end of the other process is noticed."""


@dataclass
class CopyWeather:
    """What becomes of links and copies now; chances are per link, pull, and layer of a push."""

    fail: float = 0.0
    slow: float = 0.0
    slow_s: float = 0.0
    """The most that a slow copy takes longer."""
    fail_link: float = 0.0


class SimDataDist(FakeDataDist):
    """One network of engines."""

    engines: dict[int, Any]
    """``SimEngine`` by cluster id."""

    def __init__(self, hub: Hub) -> None:
        super().__init__()
        self.hub = hub
        self.copy_weather = CopyWeather()
        self.block_s = 0.00005
        """To copy one block of one layer."""
        self.num_faults: dict[str, int] = {}
        self.api.LLMDataDist = partial(SimEngine, self)

    def forget_process(self, process: Process) -> None:
        """Its memory is gone."""
        gone = {cid for cid, engine in self.engines.items() if engine.process is process}
        for cluster_id in gone:
            del self.engines[cluster_id]
        for reservation in self.open_reservations:
            reservation.is_open &= reservation.cluster_id not in gone

    def failure(self) -> bool:
        """Whether this copy is to fail."""
        return self._falls("copy failed", self.copy_weather.fail)

    def extra_s(self) -> float:
        """How much longer this copy takes."""
        if self._falls("copy slowed", self.copy_weather.slow):
            return self.hub.random.random() * self.copy_weather.slow_s
        return 0.0

    def link_fails(self) -> bool:
        return self._falls("link failed", self.copy_weather.fail_link)

    def _falls(self, name: str, chance: float) -> bool:
        if self.hub.random.random() >= chance:
            return False
        self.num_faults[name] = self.num_faults.get(name, 0) + 1
        return True


class _LayerCopying:
    """What P's engine learns of a layer that D's copies."""

    def __init__(self, hub: Hub) -> None:
        self.ended = SimEvent(hub)
        self.status = LLMStatusCode.LLM_SUCCESS

    def end(self, status: LLMStatusCode) -> None:
        self.status = status
        self.ended.set()


class SimEngine(FakeEngine):
    """One ``LLMDataDist`` of one simulated worker."""

    _network: SimDataDist

    def __init__(self, network: SimDataDist, role: Any, cluster_id: int) -> None:
        super().__init__(network, role, cluster_id)
        self._hub = network.hub
        assert self._hub.current is not None
        self.process = self._hub.current.process
        self.process.on_death.append(partial(network.forget_process, self.process))

    @property
    def _timeout_s(self) -> float:
        return float(self.options["sync_kv_timeout"]) / 1000

    # Links

    def link_clusters(self, clusters: Any, timeout: int = 3000) -> Any:
        self._hub.sleep(4 * HOP_S)
        for cluster in clusters:
            peer = self._network.engines.get(cluster.remote_cluster_id)
            if peer is not None and not self._answers(peer, timeout / 1000):
                self._link_errors[cluster.remote_cluster_id] = "no answer"
                return LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED]
        return super().link_clusters(clusters, timeout)

    def _link(self, cluster: LLMClusterInfo) -> LLMStatusCode:
        if self._network.link_fails():
            self._link_errors[cluster.remote_cluster_id] = "simulated"
            return LLMStatusCode.LLM_LINK_FAILED
        return super()._link(cluster)

    def _answers(self, peer: SimEngine, timeout_s: float) -> bool:
        """Wait for a process that is stopped; False when it does not go on in time."""
        end_s = self._hub.now_s + timeout_s
        while peer.process.is_stopped and self._hub.now_s < end_s:
            self._hub.sleep(CHECK_S)
        return not peer.process.is_stopped

    # Pull: P's engine opens it, D's copies.

    def _pull(self, key: BlocksCacheKey, dst: Cache, call: PullCall, faults: Faults) -> None:
        end_s = self._hub.now_s + self._timeout_s
        peer = self._network.engines.get(key.prompt_cluster_id)
        if peer is not None and not self._answers(peer, self._timeout_s):
            raise LLMException("P does not answer", status_code=LLMStatusCode.LLM_TIMEOUT)
        if call.remote_cluster_id not in self.linked:
            raise LLMException("not linked", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        src = self._source(key)
        _check_blocks(call, src.cache_desc, dst.cache_desc)
        self._hub.sleep(HOP_S + self._network.extra_s())
        fails = self._network.failure()
        for number, _ in enumerate(self._copied_pull(key, src, dst, call)):
            if fails and number >= len(call.dst_blocks) // 2:
                raise LLMException("simulated", status_code=LLMStatusCode.LLM_FAILED)
            self._hub.sleep(self._network.block_s)
            if self._hub.now_s > end_s:
                raise LLMException("too slow", status_code=LLMStatusCode.LLM_TIMEOUT)

    def _copied_pull(
        self, key: BlocksCacheKey, src: Cache, dst: Cache, call: PullCall
    ) -> Iterator[None]:
        """Copies one block with each step."""
        length = dst.cache_desc.block_len
        watch = self._network.watches.get(self.cluster_id)
        for src_base, dst_base in zip(
            src.per_device_tensor_addrs[0], dst.per_device_tensor_addrs[0], strict=True
        ):
            for src_block, dst_block in zip(call.src_blocks, call.dst_blocks, strict=True):
                self._source(key)
                if watch is not None and watch.is_free(dst_block):
                    self._network.violations.append(f"pull into {dst_block}, nobody's: {call}")
                ctypes.memmove(dst_base + dst_block * length, src_base + src_block * length, length)
                yield

    # Push: P's engine offers layers, D's copies.

    def _copy(self, src: Cache, call: PushCall, layer: int) -> LLMStatusCode:
        self._hub.sleep(HOP_S)
        peer = self._network.engines.get(call.remote_cluster_id)
        if self._ending.is_set() or peer is None:
            return LLMStatusCode.LLM_TIMEOUT
        if self.cluster_id not in peer.linked:
            return LLMStatusCode.LLM_NOT_YET_LINK
        copy = _LayerCopying(self._hub)
        self._hub.start(
            peer.process,
            lambda: copy.end(peer.copy_layer(self, src, call, layer)),
            f"copy {call.token} layer {layer}",
        )
        deadline_s = self._hub.now_s + self._timeout_s
        while not copy.ended.wait(CHECK_S):
            is_lost = self._ending.is_set() or not peer.process.is_alive
            if is_lost or self._hub.now_s >= deadline_s:
                return LLMStatusCode.LLM_TIMEOUT
        return copy.status

    def copy_layer(
        self, source: SimEngine, src: Cache, call: PushCall, layer: int
    ) -> LLMStatusCode:
        """D's engine: one layer, block by block, into what is reserved."""
        network = self._network
        reservation = network.reservations.get(call.token)
        if reservation is None or reservation.cluster_id != self.cluster_id:
            return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        if reservation.model_id != call.model_id:
            return LLMStatusCode.LLM_PARAM_INVALID
        self._hub.sleep(network.extra_s())
        fails = network.failure()
        length = src.cache_desc.block_len
        src_base = src.per_device_tensor_addrs[0][layer]
        dst_base = reservation.cache.per_device_tensor_addrs[0][layer]
        for number, (block, position) in enumerate(
            zip(call.src_blocks, call.dst_positions, strict=True)
        ):
            if not self._may_write(reservation):
                return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            if network.engines.get(source.cluster_id) is not source:
                return LLMStatusCode.LLM_TIMEOUT
            if fails and number >= len(call.src_blocks) // 2:
                return LLMStatusCode.LLM_FAILED
            target = reservation.blocks[position]
            source.check(call, layer, src_base + block * length, length, target)
            ctypes.memmove(dst_base + target * length, src_base + block * length, length)
            self._hub.sleep(network.block_s)
        return LLMStatusCode.LLM_SUCCESS

    def _may_write(self, reservation: Reservation) -> bool:
        return reservation.is_open

    def check(
        self, call: PushCall, layer: int, from_address: int, length: int, target: int
    ) -> None:
        """What must not be: a layer that is not computed, a block that is nobody's."""
        self._check(call, layer, from_address, length, target)
