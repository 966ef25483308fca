"""The fake engine's reservations and layer-wise pushes, with faults on demand.

Each push has a thread, as in the real engine. What a push must never do, whatever the test does, is
noted in ``PushNetwork.violations``; a ``Watch`` tells what the engines on both sides know of the
memory.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fakes.clock import PATIENCE_S
from fakes.fake_types import BlocksCacheKey, Cache, LLMException, LLMStatusCode

_END_CHECK_S = 0.02
"""How soon a held push notices that its engine is finalized."""


class Watch(Protocol):
    """What the owner of a cluster's memory knows about it."""

    def is_unwritten(self, address: int, length: int) -> bool:
        """Whether the running forward has still to write into these bytes."""

    def is_free(self, block: int) -> bool:
        """Whether nobody owns this block."""


class PushCall(NamedTuple):
    """One push that was started."""

    local_cluster_id: int
    remote_cluster_id: int
    model_id: int
    token: int
    src_blocks: tuple[int, ...]
    dst_positions: tuple[int, ...]


class LayerCopy(NamedTuple):
    """One layer of a push that has arrived."""

    call: PushCall
    layer: int


@dataclass
class PushFaults:
    """What goes wrong with the pushes to one cluster; change the fields at any time."""

    status: LLMStatusCode | None = None
    """Pushes end with this code instead of copying layer ``at_layer``."""
    at_layer: int = 0
    num_failures: int | None = None
    """So many pushes end with ``status``; counted down. None: all of them."""
    gate: threading.Event | None = None
    """Pushes wait for this event before they copy layer ``hold_at``, computed as it is."""
    hold_at: int = 0
    held: threading.Event = field(default_factory=threading.Event)
    """Set when a push has come to ``gate``."""


@dataclass(eq=False)
class Reservation:
    """Blocks of one cache that were set aside; ``is_open`` until they are given up."""

    cluster_id: int
    model_id: int
    cache: Cache
    blocks: tuple[int, ...]
    is_open: bool = True
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held during a copy; closing waits for it."""


class TransferWithCacheKeyConfig:
    def __init__(
        self,
        cache_key: BlocksCacheKey,
        src_layer_range: range,
        dst_layer_range: range,
        *,
        token: int,
    ) -> None:
        self.cache_key = cache_key
        self.src_layer_range = src_layer_range
        self.dst_layer_range = dst_layer_range
        self.token = token


class _Step:
    """The marks of one forward."""

    def __init__(self, num_layers: int) -> None:
        self.marks = [False] * num_layers
        self.is_over = False
        self.changed = threading.Condition()

    def mark(self, *layers: int) -> None:
        with self.changed:
            for layer in layers:
                self.marks[layer] = True
            self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    def wait(self, layer: int, timeout_s: float = PATIENCE_S) -> bool:
        """Whether the layer is marked at last, or when the step is over."""
        with self.changed:
            self.changed.wait_for(lambda: self.marks[layer] or self.is_over, timeout_s)
            return self.marks[layer]


class FakeSynchronizer:
    """``NativeLayerSynchronizer``: a transfer belongs to the step in which it was started."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self.step = _Step(num_layers)

    @property
    def marked(self) -> list[bool]:
        return list(self.step.marks)

    def mark(self, layer_index: int) -> None:
        self.step.mark(layer_index)

    def mark_all(self) -> None:
        self.step.mark(*range(self._num_layers))

    def reset(self) -> None:
        previous, self.step = self.step, _Step(self._num_layers)
        previous.end()


class PushNetwork:
    """What all engines share of reservations and pushes."""

    def __init__(self) -> None:
        self.engines: dict[int, Any] = {}
        self.violations: list[str] = []
        self.reservations: dict[int, Reservation] = {}
        """By token; closed ones stay."""
        self.pushes: list[PushCall] = []
        self.layer_copies: list[LayerCopy] = []
        self.early_copies: dict[int, list[str]] = {}
        """By token. A violation when P then says ``Done``: what a preempted prompt still had under
        way may read blocks that are another's by now, and counts for nothing."""
        self.watches: dict[int, Watch] = {}
        """By cluster id."""
        self.tokens = itertools.count(1)
        self._push_faults: dict[int, PushFaults] = {}
        self._push_lock = threading.Lock()

    def push_faults(self, cluster_id: int) -> PushFaults:
        """What goes wrong with pushes to this cluster."""
        with self._push_lock:
            return self._push_faults.setdefault(cluster_id, PushFaults())

    def takes_push(self, cluster_id: int, layer: int) -> LLMStatusCode | None:
        """With which code a push to this cluster ends before ``layer``, or None."""
        faults = self.push_faults(cluster_id)
        with self._push_lock:
            if faults.status is None or layer != faults.at_layer or faults.num_failures == 0:
                return None
            if faults.num_failures is not None:
                faults.num_failures -= 1
            return faults.status

    @property
    def open_reservations(self) -> list[Reservation]:
        return [r for r in list(self.reservations.values()) if r.is_open]


class FakeTask:
    """``CacheTask`` of one destination."""

    def __init__(self) -> None:
        self._status = LLMStatusCode.LLM_SUCCESS
        self._ended = threading.Event()

    def end(self, status: LLMStatusCode) -> None:
        self._status = status
        self._ended.set()

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        timeout_s = None if timeout_in_millis is None else timeout_in_millis / 1000
        return self._status if self._ended.wait(timeout_s) else LLMStatusCode.LLM_TIMEOUT


class PushSide:
    """The part of a fake engine that pushes, and is pushed into."""

    options: dict[str, Any]

    def __init__(self, network: PushNetwork, cluster_id: int) -> None:
        self._pushes_to = network
        self.cluster_id = cluster_id
        self.linked: set[int] = set()
        self.caches: dict[BlocksCacheKey, Cache] = {}
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def reservations(self) -> dict[int, Reservation]:
        """Those of this engine that are open, by token."""
        known = list(self._pushes_to.reservations.items())
        return {t: r for t, r in known if r.is_open and r.cluster_id == self.cluster_id}

    def require_reservations(self, cache: Cache) -> None:
        """Nothing here pushes without a token."""

    def open_reservation(self, cache: Cache, blocks: Sequence[int]) -> int:
        network = self._pushes_to
        model_id = next(key.model_id for key, known in self.caches.items() if known is cache)
        taken = {
            block
            for other in network.open_reservations
            if (other.cluster_id, other.model_id) == (self.cluster_id, model_id)
            for block in other.blocks
        }
        if taken & set(blocks):
            network.violations.append(f"{self.cluster_id:x}: {taken & set(blocks)} reserved twice")
        token = next(network.tokens)
        network.reservations[token] = Reservation(self.cluster_id, model_id, cache, tuple(blocks))
        return token

    def close_reservation(self, token: int) -> None:
        if self._ending.is_set():
            self._pushes_to.violations.append(f"{self.cluster_id:x}: reservation after finalize")
        reservation = self._pushes_to.reservations[token]
        with reservation.lock:
            reservation.is_open = False

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: FakeSynchronizer,
        transfer_configs: Sequence[TransferWithCacheKeyConfig],
        src_block_indices: Sequence[int],
        dst_block_indices: Sequence[int],
        *,
        tensor_num_per_layer: int = 2,
    ) -> FakeTask:
        (config,) = transfer_configs
        num_layers = src_cache.cache_desc.num_tensors
        if tensor_num_per_layer != 1 or config.src_layer_range != range(num_layers):
            raise LLMException("layers", status_code=LLMStatusCode.LLM_PARAM_INVALID)
        call = PushCall(
            self.cluster_id,
            config.cache_key.prompt_cluster_id,
            config.cache_key.model_id,
            config.token,
            tuple(src_block_indices),
            tuple(dst_block_indices),
        )
        if not call.src_blocks or len(call.src_blocks) != len(call.dst_positions):
            raise LLMException(f"blocks: {call}", status_code=LLMStatusCode.LLM_PARAM_INVALID)
        self._pushes_to.pushes.append(call)
        task, step = FakeTask(), layer_synchronizer.step
        if self._ending.is_set():
            self._pushes_to.violations.append(f"{self.cluster_id:x}: push after finalize")

        def run() -> None:
            task.end(self._push(src_cache, step, call))

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return task

    def end_pushes(self) -> None:
        """The engine is finalized: what is under way ends."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _push(self, src: Cache, step: _Step, call: PushCall) -> LLMStatusCode:
        network = self._pushes_to
        timeout_s = float(self.options["sync_kv_timeout"]) / 1000
        for layer in range(src.cache_desc.num_tensors):
            status = self._wait(step, layer, timeout_s)
            if status is LLMStatusCode.LLM_SUCCESS:
                self._hold(network.push_faults(call.remote_cluster_id), layer)
                failure = network.takes_push(call.remote_cluster_id, layer)
                status = self._copy(src, call, layer) if failure is None else failure
            if status is not LLMStatusCode.LLM_SUCCESS:
                return status
            network.layer_copies.append(LayerCopy(call, layer))
        return LLMStatusCode.LLM_SUCCESS

    def _wait(self, step: _Step, layer: int, timeout_s: float) -> LLMStatusCode:
        waited_s = 0.0
        while not step.wait(layer, _END_CHECK_S):
            waited_s += _END_CHECK_S
            if self._ending.is_set():
                return LLMStatusCode.LLM_FAILED
            if step.is_over:
                return LLMStatusCode.LLM_PARAM_INVALID
            if waited_s >= timeout_s:
                return LLMStatusCode.LLM_TIMEOUT
        return LLMStatusCode.LLM_SUCCESS

    def _hold(self, faults: PushFaults, layer: int) -> None:
        if faults.gate is None or layer != faults.hold_at:
            return
        gate = faults.gate
        faults.held.set()
        while not gate.wait(_END_CHECK_S) and not self._ending.is_set():
            pass

    def _copy(self, src: Cache, call: PushCall, layer: int) -> LLMStatusCode:
        """One layer, as D's engine copies it: into open reservations of linked peers only."""
        network = self._pushes_to
        peer = network.engines.get(call.remote_cluster_id)
        if self._ending.is_set() or peer is None:
            return LLMStatusCode.LLM_TIMEOUT
        if self.cluster_id not in peer.linked:
            return LLMStatusCode.LLM_NOT_YET_LINK
        reservation = network.reservations.get(call.token)
        if reservation is None or reservation.cluster_id != call.remote_cluster_id:
            return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        with reservation.lock:
            if not reservation.is_open:
                return LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
            if reservation.model_id != call.model_id:
                return LLMStatusCode.LLM_PARAM_INVALID
            length = src.cache_desc.block_len
            src_base = src.per_device_tensor_addrs[0][layer]
            dst_base = reservation.cache.per_device_tensor_addrs[0][layer]
            for block, position in zip(call.src_blocks, call.dst_positions, strict=True):
                target = reservation.blocks[position]
                from_address = src_base + block * length
                self._check(call, layer, from_address, length, target)
                ctypes.memmove(dst_base + target * length, from_address, length)
        return LLMStatusCode.LLM_SUCCESS

    def _check(
        self, call: PushCall, layer: int, from_address: int, length: int, target: int
    ) -> None:
        network = self._pushes_to
        ours = network.watches.get(call.local_cluster_id)
        theirs = network.watches.get(call.remote_cluster_id)
        if ours is not None and ours.is_unwritten(from_address, length):
            text = f"layer {layer} left before it was computed: {call}"
            network.early_copies.setdefault(call.token, []).append(text)
        if theirs is not None and theirs.is_free(target):
            network.violations.append(f"block {target} was written, but is nobody's: {call}")
