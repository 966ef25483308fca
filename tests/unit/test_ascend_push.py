"""Pushes over the vendor's package: its faults, and which call is used for what."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fakes.fake_npu import FakeNpu
from fakes.install import vendor_importable

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.errors import TransferError, TransferTimeout
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.engine import DataDistEngine

pytest.importorskip("vllm_llmdd_connector.datadist", exc_type=ImportError)
from vllm_llmdd_connector.datadist import ascend

NPU = SimpleNamespace(type="npu", index=3)
PEER = 9


def plan(*layers: str) -> CachePlan:
    regions = tuple(Region(f"{layer}#{i}", 0, 64, (layer,)) for layer in layers for i in (0, 1))
    return CachePlan(0, 0, 8, 64, regions)


THREE = plan("a", "b", "c")


class FaultyTask:
    """The vendor's task: results by cluster; success if there is none."""

    def __init__(self, clusters: list[int]) -> None:
        self.clusters = clusters
        self.results: dict[int, Any] = {}
        self.thread: threading.Thread | None = None

    def synchronize(self, timeout_in_millis: int | None = None) -> Any:
        assert self.thread is not None
        self.thread.join()
        bad = [code for code in self.results.values() if code.name != "LLM_SUCCESS"]
        return bad[0] if bad else ascend.load_vendor().LLMStatusCode.LLM_SUCCESS

    def get_results(self, timeout_in_millis: int | None = None) -> list[Any]:
        return [self.results.get(cluster) for cluster in self.clusters]


class FaultyManager:
    """The vendor's ``CacheManager`` with the faults of its layer-wise transfer."""

    def __init__(self, codes: Any) -> None:
        self._codes = codes
        self.fail_at: tuple[int, str] | None = None
        self.layers: list[tuple[int, int]] = []
        """Source and destination layer of each copy."""
        self.pushes: list[dict[str, Any]] = []

    def transfer_cache_async(
        self, cache: Any, synchronizer: Any, configs: list[Any], src: list[int], dst: list[int]
    ) -> FaultyTask:
        assert isinstance(synchronizer, ascend.load_vendor().LayerSynchronizer)
        task = FaultyTask([config.cache_key.cluster_id for config in configs])

        def run() -> None:
            try:
                self._run(task, synchronizer, configs)
            except Exception:
                """The thread dies, and nobody hears of it."""

        task.thread = threading.Thread(target=run)
        task.thread.start()
        return task

    def _run(self, task: FaultyTask, synchronizer: Any, configs: list[Any]) -> None:
        for layer in range(3):
            wanting = [config for config in configs if layer in config.src_layer_range]
            if wanting and not synchronizer.synchronize_layer(layer, None):
                for config in wanting:
                    task.results[config.cache_key.cluster_id] = self._codes.LLM_PARAM_INVALID
                return
            for config in wanting:
                if self.fail_at is not None and self.fail_at[0] == layer:
                    task.results[config.cache_key.cluster_id] = self._codes[self.fail_at[1]]
                    return
                self.layers.append((layer, list(config.dst_layer_range)[layer]))
                if layer == config.src_layer_range.stop - 1:
                    task.results[config.cache_key.cluster_id] = self._codes.LLM_SUCCESS

    def push_blocks(self, key: Any, cache: Any, src: Any, dst: Any, **options: Any) -> None:
        self.pushes.append({"src": src, "dst": dst, **options})


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with vendor_importable(monkeypatch):
        yield importlib.import_module("llm_datadist")


@pytest.fixture
def manager(vendor: ModuleType) -> FaultyManager:
    return FaultyManager(vendor.LLMStatusCode)


@pytest.fixture
def engine(
    vendor: ModuleType, manager: FaultyManager, monkeypatch: pytest.MonkeyPatch
) -> DataDistEngine:
    """On an NPU, over the faulty manager."""
    monkeypatch.setitem(sys.modules, "torch_npu", FakeNpu())
    monkeypatch.setattr(vendor.LLMDataDist, "init", lambda self, options: None)
    monkeypatch.setattr(vendor.LLMDataDist, "cache_manager", manager)
    config = ConnectorConfig()
    engine = DataDistEngine(config, ascend.AscendBackend(config, NPU), 7, [], False)
    engine._caches = [object()]
    return engine


Push = Callable[[Callable[[int], bool]], int]


@pytest.fixture
def push(engine: DataDistEngine) -> Push:
    """Blocks 1 and 2 of all three layers into blocks 5 and 4."""
    return lambda wait: engine.push_layers(THREE, PEER, [1, 2], [5, 4], wait)


class TestTransfer:
    def test_all_layers_go_each_to_its_own(self, push: Push, manager: FaultyManager) -> None:
        asked: list[int] = []
        assert push(lambda layer: asked.append(layer) is None) == 3
        assert asked == [0, 1, 2]
        assert manager.layers == [(0, 0), (1, 1), (2, 2)]

    def test_refused_layer_is_no_failure_and_tells_how_many_arrived(
        self, push: Push, manager: FaultyManager
    ) -> None:
        assert push(lambda layer: layer < 2) == 2
        assert manager.layers == [(0, 0), (1, 1)]
        assert push(lambda layer: False) == 0

    def test_rest_of_a_transfer_goes_by_calls_whose_ranges_are_right(
        self, engine: DataDistEngine, manager: FaultyManager
    ) -> None:
        """The vendor's layer-wise call reads a range that begins at layer 2 from its end."""
        engine.push_layer(THREE, 2, PEER, [1, 2], [5, 4])
        assert manager.pushes == [
            {
                "src": [1, 2],
                "dst": [5, 4],
                "src_layer_range": range(2, 3),
                "dst_layer_range": range(2, 3),
                "tensor_num_per_layer": 2,
            }
        ]

    def test_wait_that_raises_is_no_success(self, push: Push) -> None:
        def broken(layer: int) -> bool:
            raise RuntimeError("broken")

        with pytest.raises(TransferError, match="LLM_PARAM_INVALID"):
            push(broken)

    def test_thread_that_died_is_no_success(
        self, push: Push, manager: FaultyManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(manager, "_run", lambda *args: 1 // 0)
        with pytest.raises(TransferError, match="LLM_FAILED"):
            push(lambda layer: True)

    @pytest.mark.parametrize(
        ("code", "kind"), [("LLM_TIMEOUT", TransferTimeout), ("LLM_NOT_YET_LINK", TransferError)]
    )
    def test_failure_has_its_name_and_a_remedy(
        self, push: Push, manager: FaultyManager, code: str, kind: type[Exception]
    ) -> None:
        manager.fail_at = (1, code)
        with pytest.raises(kind, match=f"cluster 9 ended with {code}: .*") as caught:
            push(lambda layer: True)
        assert type(caught.value) is kind


class TestChoice:
    def test_layer_wise_call_is_for_two_tensors_a_layer_and_a_bounded_list(
        self, engine: DataDistEngine
    ) -> None:
        single = CachePlan(0, 0, 8, 64, (Region("a", 0, 64, ("a",)), Region("b", 0, 64, ("b",))))
        assert engine.can_push_layers(THREE, 32768)
        assert not engine.can_push_layers(THREE, 32769)
        assert not engine.can_push_layers(single, 1)

    def test_layer_wise_call_refuses_host_memory(self, vendor: ModuleType) -> None:
        config = ConnectorConfig()
        backend = ascend.AscendBackend(config, SimpleNamespace(type="cpu", index=None))
        engine = DataDistEngine(config, backend, 7, [], False)
        assert engine.can_push
        assert not engine.can_push_layers(THREE, 1)
        engine.close()

    def test_long_lists_are_pushed_in_pieces(
        self, engine: DataDistEngine, manager: FaultyManager
    ) -> None:
        engine._backend.max_blocks_per_call = 3
        engine.push_layer(THREE, 0, PEER, list(range(7)), list(range(10, 17)))
        assert [push["src"] for push in manager.pushes] == [[0, 1, 2], [3, 4, 5], [6]]

    def test_package_without_pushes_is_pulled_from(
        self, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vendor.LLMDataDist, "init", lambda self, options: None)
        monkeypatch.setattr(vendor.LLMDataDist, "cache_manager", object())
        config = ConnectorConfig()
        backend = ascend.AscendBackend(config, SimpleNamespace(type="cpu", index=None))
        assert not DataDistEngine(config, backend, 7, [], False).can_push


class TestLinks:
    def test_pull_waits_for_the_push_of_its_link_and_not_for_others(
        self, engine: DataDistEngine, manager: FaultyManager
    ) -> None:
        begun, go_on = threading.Event(), threading.Event()
        pulled: list[int] = []
        manager.pull_blocks = lambda key, *args, **options: pulled.append(key.cluster_id)  # type: ignore[attr-defined]

        def wait(layer: int) -> bool:
            begun.set()
            return go_on.wait(20)

        pushing = threading.Thread(target=engine.push_layers, args=(THREE, PEER, [1], [5], wait))
        pushing.start()
        assert begun.wait(20)
        same = threading.Thread(target=engine.pull, args=(PEER, THREE, [1], [2]))
        same.start()
        engine.pull(PEER + 1, THREE, [1], [2])
        assert pulled == [PEER + 1]
        go_on.set()
        for thread in (pushing, same):
            thread.join()
        assert pulled == [PEER + 1, PEER]

    def test_link_that_the_peer_has_made_is_dropped_by_force(
        self, engine: DataDistEngine, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dropped: list[Any] = []
        monkeypatch.setattr(
            vendor.LLMDataDist,
            "unlink_clusters",
            lambda self, clusters, timeout, force: dropped.append(
                (clusters[0].remote_cluster_id, force)
            ),
        )
        engine.drop_link(PEER)
        assert dropped == [(PEER, True)]

    def test_nothing_is_finalized_beside_a_call(
        self, engine: DataDistEngine, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        finalized: list[object] = []
        monkeypatch.setattr(vendor.LLMDataDist, "finalize", lambda self: finalized.append(self))
        with engine._backend.on_link(PEER):
            engine.close()
        assert finalized == []
        engine.close()
        assert len(finalized) == 1
