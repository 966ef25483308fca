"""Extension of the host engine: when each layer of a transfer left and was acknowledged."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import wait_until
from contract.peer import Peer

pytestmark = [remote_mode, refused_by_vendor(Restriction.NO_EXTENSIONS)]

Pair = Callable[..., tuple[Cluster, Peer]]
LAYERS = 4


def by_key(local: Cluster, layers: range = range(LAYERS), token: int | None = None) -> Any:
    key = local.api.BlocksCacheKey(2)
    return local.api.TransferWithCacheKeyConfig(key, layers, layers, token=token)


def start(local: Cluster, peer: Peer, synchronizer: Any, *layers: range) -> Any:
    source = local.add_blocks(tensors=LAYERS, seed=100)
    peer.add_blocks(tensors=LAYERS)
    configs = [by_key(local, part) for part in layers]
    return local.transfer(synchronizer, source, configs, [1], [2], tensor_num_per_layer=1)


class TestLayerTimes:
    def test_one_per_layer_in_order_on_the_monotonic_clock(self, pair: Pair) -> None:
        local, peer = pair()
        synchronizer = local.api.NativeLayerSynchronizer(LAYERS)
        before_ns = time.monotonic_ns()
        task = start(local, peer, synchronizer, range(LAYERS))
        assert task.layer_times() == []
        marked_ns = []
        for layer in range(LAYERS):
            marked_ns.append(time.monotonic_ns())
            synchronizer.mark(layer)
        assert task.synchronize().name == "LLM_SUCCESS"
        after_ns = time.monotonic_ns()
        times = task.layer_times()
        assert [(t.config_index, t.layer_index) for t in times] == [(0, n) for n in range(LAYERS)]
        assert [t.started_ns for t in times] == sorted(t.started_ns for t in times)
        assert [t.acknowledged_ns for t in times] == sorted(t.acknowledged_ns for t in times)
        for marked, found in zip(marked_ns, times, strict=True):
            assert before_ns <= marked <= found.started_ns < found.acknowledged_ns <= after_ns

    def test_layers_that_have_arrived_are_known_while_others_wait(self, pair: Pair) -> None:
        local, peer = pair()
        synchronizer = local.api.NativeLayerSynchronizer(LAYERS)
        synchronizer.mark(0)
        task = start(local, peer, synchronizer, range(LAYERS))
        wait_until(lambda: len(task.layer_times()) == 1)
        synchronizer.mark_all()
        assert task.synchronize().name == "LLM_SUCCESS"
        assert len(task.layer_times()) == LAYERS

    def test_each_config_has_its_own_layers(self, pair: Pair) -> None:
        local, peer = pair()
        synchronizer = local.api.NativeLayerSynchronizer(LAYERS)
        synchronizer.mark_all()
        task = start(local, peer, synchronizer, range(3), range(2, LAYERS))
        assert task.synchronize().name == "LLM_SUCCESS"
        found = sorted((t.config_index, t.layer_index) for t in task.layer_times())
        assert found == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 3)]

    def test_layer_that_did_not_arrive_has_no_time(self, pair: Pair) -> None:
        local, peer = pair()
        source = local.add_blocks(tensors=LAYERS, seed=100)
        target = peer.add_blocks(tensors=LAYERS)
        token = peer.open_reservation(target, [2])
        synchronizer = local.api.NativeLayerSynchronizer(LAYERS)
        synchronizer.mark(0)
        config = by_key(local, token=token)
        task = local.transfer(synchronizer, source, [config], [1], [0], tensor_num_per_layer=1)
        wait_until(lambda: len(task.layer_times()) == 1)
        peer.close_reservation(token)
        synchronizer.mark_all()
        assert task.synchronize().name == "LLM_KV_CACHE_NOT_EXIST"
        assert [t.layer_index for t in task.layer_times()] == [0]
