"""The vendor's package behind the connector: what is checked before it is asked, and its words."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from enum import Enum, IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fakes.fake_npu import FakeNpu
from fakes.install import vendor_importable

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.errors import ConfigError, LinkError, TransferError, TransferTimeout
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.backend import HostBackend, choose_backend
from vllm_llmdd_connector.worker.engine import DataDistEngine

pytest.importorskip("vllm_llmdd_connector.datadist", exc_type=ImportError)
from vllm_llmdd_connector.datadist import LLMStatusCode, ascend
from vllm_llmdd_connector.datadist.vendor_status import REMEDIES, remedy

CPU = SimpleNamespace(type="cpu", index=None)
NPU = SimpleNamespace(type="npu", index=3)
MIB2 = 2 << 20


class Device(SimpleNamespace):
    """As torch prints it."""

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


def on(device_type: str, index: int | None = None) -> Any:
    """A KV tensor there."""
    return SimpleNamespace(device=Device(type=device_type, index=index))


def plan(num_regions: int, first: int = MIB2, step: int = MIB2) -> CachePlan:
    regions = tuple(Region(f"layer{i}", first + i * step, 64) for i in range(num_regions))
    return CachePlan(0, 0, 8, 64, regions)


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The strict ``llm_datadist``, freshly imported."""
    with vendor_importable(monkeypatch):
        yield importlib.import_module("llm_datadist")


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    module = FakeNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return module


class TestChoice:
    @pytest.mark.parametrize("engine", ["auto", "host"])
    def test_host_tensors_go_to_our_engine(self, engine: Any) -> None:
        config = ConnectorConfig(engine=engine)
        assert isinstance(choose_backend(config, {"a": on("cpu")}), HostBackend)

    @pytest.mark.parametrize(
        ("engine", "device"), [("auto", "npu"), ("ascend", "npu"), ("ascend", "cpu")]
    )
    def test_npu_tensors_and_the_option_go_to_the_vendor(
        self, vendor: ModuleType, npu: FakeNpu, engine: Any, device: str
    ) -> None:
        backend = choose_backend(ConnectorConfig(engine=engine), {"a": [on(device, 0)] * 2})
        assert isinstance(backend, ascend.AscendBackend)
        assert backend.api is vendor

    @pytest.mark.parametrize(
        ("engine", "caches", "sentence"),
        [
            (
                "host",
                {"a": on("npu", 1)},
                "layer a is on device npu:1.*set engine to 'ascend' or 'auto'",
            ),
            ("auto", {"a": on("cuda", 0)}, "layer a is on device cuda:0.*run vLLM's CPU build"),
            ("ascend", {"a": on("cuda", 0)}, "'ascend' moves NPU and host memory only"),
            (
                "auto",
                {"a": on("cpu"), "b": (on("cpu"), on("npu", 0))},
                "several devices.*layer a on cpu, layer b on npu:0",
            ),
            ("auto", {}, "no KV cache"),
        ],
    )
    def test_memory_that_no_engine_moves_is_refused(
        self, engine: Any, caches: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ConfigError, match=sentence):
            choose_backend(ConnectorConfig(engine=engine), caches)

    def test_digests_of_device_memory_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="leave kv_digest out"):
            choose_backend(ConnectorConfig(kv_digest="/tmp/x"), {"a": on("npu", 0)})

    @pytest.mark.parametrize("integrity", ["sample", "full"])
    @pytest.mark.parametrize("engine", ["auto", "ascend"])
    def test_checksums_of_device_memory_are_refused(self, engine: Any, integrity: Any) -> None:
        config = ConnectorConfig(engine=engine, integrity=integrity)
        with pytest.raises(ConfigError, match=rf"integrity '{integrity}' reads host memory, but"):
            choose_backend(config, {"a": on("npu", 0)})


class TestPackage:
    def test_missing_package_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llm_datadist", None)
        with pytest.raises(ConfigError, match=r"CANN toolkit, 8\.3 to 9\.2.*or use engine 'host'"):
            choose_backend(ConnectorConfig(engine="ascend"), {"a": on("cpu")})

    def test_old_package_is_refused_by_what_it_lacks(
        self, monkeypatch: pytest.MonkeyPatch, vendor: ModuleType
    ) -> None:
        class OldConfig:
            device_id = enable_cache_manager = enable_remote_cache_accessible = None
            listen_ip_info = sync_kv_timeout = None

        monkeypatch.setattr(vendor, "LLMConfig", OldConfig)
        with pytest.raises(ConfigError, match=r"has no LLMConfig\.local_comm_res: it is not of"):
            ascend.load_vendor()
        monkeypatch.delattr(vendor, "LLMConfig")
        with pytest.raises(ConfigError, match="has no LLMConfig: it is not of"):
            ascend.load_vendor()

    def test_npu_tensors_need_torch_npu(
        self, monkeypatch: pytest.MonkeyPatch, vendor: ModuleType
    ) -> None:
        monkeypatch.setitem(sys.modules, "torch_npu", None)
        with pytest.raises(ConfigError, match="torch_npu cannot be imported"):
            choose_backend(ConnectorConfig(), {"a": on("npu", 0)})


class TestPlans:
    def test_addresses_are_counted_over_all_caches(self, vendor: ModuleType, npu: FakeNpu) -> None:
        backend = ascend.AscendBackend(ConnectorConfig(), NPU)
        backend.check_plans([plan(120), plan(120)])
        with pytest.raises(ConfigError, match=r"241 tensors to register.*takes 240 addresses"):
            backend.check_plans([plan(120), plan(121)])

    def test_npu_addresses_are_aligned(self, vendor: ModuleType, npu: FakeNpu) -> None:
        backend = ascend.AscendBackend(ConnectorConfig(), NPU)
        with pytest.raises(ConfigError, match=r"layer layer1 begins at 0x300000, .* 2097152"):
            backend.check_plans([plan(2, step=MIB2 // 2)])

    def test_host_addresses_need_no_alignment(
        self, vendor: ModuleType, caplog: pytest.LogCaptureFixture
    ) -> None:
        ascend.AscendBackend(ConnectorConfig(), CPU).check_plans([plan(2, first=64, step=64)])


class TestStart:
    def started(self, vendor: ModuleType, device: Any = CPU, **options: Any) -> Any:
        backend = ascend.AscendBackend(ConnectorConfig(**options), device)
        backend.start(7, True)
        return backend

    def test_free_port_is_chosen_and_told(self, vendor: ModuleType) -> None:
        backend = self.started(vendor)
        socket.create_connection(("127.0.0.1", backend.listen_port)).close()
        backend.stop()

    def test_taken_port_is_tried_anew_a_few_times(
        self, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            answers = iter([port, port, ascend._free_port("127.0.0.1"), *[port] * 9])
            monkeypatch.setattr(ascend, "_free_port", lambda host: next(answers))
            backend = self.started(vendor)
            assert backend.listen_port != port
            backend.stop()
            with pytest.raises(ConfigError, match="5 free ports in a row were taken"):
                self.started(vendor)

    def test_other_failure_is_not_tried_again(
        self, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inits: list[dict[str, str]] = []

        def init(self: object, options: dict[str, str]) -> None:
            inits.append(options)
            raise vendor.LLMException("no", status_code=vendor.LLMStatusCode.LLM_FAILED)

        monkeypatch.setattr(vendor.LLMDataDist, "init", init)
        with pytest.raises(ConfigError, match=r"did not start on 127\.0\.0\.1.*LLM_FAILED: no: .*"):
            self.started(vendor)
        (options,) = inits
        assert options["llm.EnableCacheManager"] == "1"
        assert options["llm.EnableRemoteCacheAccessible"] == "1"
        assert options["llm.SyncKvCacheWaitTime"] == "10000"
        assert "ge.exec.deviceId" not in options

    @pytest.mark.parametrize(("index", "expected"), [(3, "3"), (None, "5")])
    def test_device_is_the_tensors(
        self,
        vendor: ModuleType,
        npu: FakeNpu,
        monkeypatch: pytest.MonkeyPatch,
        index: int | None,
        expected: str,
    ) -> None:
        seen: list[dict[str, str]] = []
        monkeypatch.setattr(vendor.LLMDataDist, "init", lambda self, options: seen.append(options))
        backend = self.started(vendor, SimpleNamespace(type="npu", index=index))
        assert seen[0]["ge.exec.deviceId"] == expected
        assert backend.placement() == {"placement": vendor.Placement.DEVICE}

    def test_address_must_be_this_machine_s(self, vendor: ModuleType) -> None:
        with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
            self.started(vendor, host="192.0.2.1")

    def test_refused_registration_gives_the_instance_back(self, vendor: ModuleType) -> None:
        config = ConnectorConfig()
        bad = plan(1, first=0)
        with pytest.raises(ConfigError, match=r"cache 0 \(1 tensors of 8 blocks of 64 B\)"):
            DataDistEngine(config, ascend.AscendBackend(config, CPU), 7, [bad], False)
        self.started(vendor).stop()


class TestLink:
    def test_foreign_address_form_is_a_link_error(self, vendor: ModuleType) -> None:
        config = ConnectorConfig()
        engine = DataDistEngine(config, ascend.AscendBackend(config, CPU), 7, [], False)
        endpoint = WorkerEndpoint(cluster_id=9, host="::1", engine_port=1, control_port=0)
        with pytest.raises(LinkError, match="cluster 9 at ::1:1 is not possible"):
            engine.link(endpoint)
        engine.unlink(endpoint)
        engine.close()

    def test_call_that_never_returns_is_left_behind_once(
        self, vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(ascend, "LINK_MARGIN_MS", 1)
        answer, asked = threading.Event(), []

        def link(self: object, clusters: list[Any], timeout: int) -> Any:
            asked.append(clusters[0].remote_cluster_id)
            answer.wait(20)
            return vendor.LLMStatusCode.LLM_SUCCESS, []

        monkeypatch.setattr(vendor.LLMDataDist, "link_clusters", link)
        finalized: list[object] = []
        monkeypatch.setattr(vendor.LLMDataDist, "finalize", finalized.append)
        backend = ascend.AscendBackend(ConnectorConfig(link_timeout_ms=20), CPU)
        backend.start(7, False)
        cluster = SimpleNamespace(remote_cluster_id=9)
        with pytest.raises(LinkError, match="did not answer within 21 ms"):
            backend.link(cluster)
        with pytest.raises(LinkError, match="an earlier attempt"):
            backend.link(cluster)
        backend.unlink(cluster)
        backend.stop()
        assert (asked, finalized) == ([9], [])
        answer.set()
        backend._link_calls[9].wait(20)
        assert backend.link(cluster) == vendor.LLMStatusCode.LLM_SUCCESS
        backend._datadist._inner.finalize()


class OldStatus(Enum):
    """As before CANN 9.1."""

    LLM_SUCCESS = 0
    LLM_TIMEOUT = 0x5010B01A
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002


class NewStatus(IntEnum):
    LLM_SUCCESS = 0
    LLM_TIMEOUT = 0x5010B01A
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002


class TestStatus:
    def test_every_remedy_is_of_a_code_that_exists(self) -> None:
        names = {code.name for code in LLMStatusCode}
        assert names >= REMEDIES.keys()

    @pytest.mark.parametrize("status", [*LLMStatusCode, 0xFFFFFFFF, "LLM_NEW"])
    def test_every_code_has_words(self, status: Any) -> None:
        assert len(remedy(status).split()) > 3

    @pytest.mark.parametrize("codes", [OldStatus, NewStatus])
    @pytest.mark.parametrize(
        ("name", "kind"),
        [("LLM_TIMEOUT", TransferTimeout), ("LLM_KV_CACHE_NOT_EXIST", TransferError)],
    )
    def test_both_kinds_of_enum_are_understood(
        self,
        vendor: ModuleType,
        monkeypatch: pytest.MonkeyPatch,
        codes: Any,
        name: str,
        kind: type[Exception],
    ) -> None:
        config = ConnectorConfig()
        engine = DataDistEngine(config, ascend.AscendBackend(config, CPU), 7, [], False)
        engine._caches = [object()]

        def pull(*args: object, **kwargs: object) -> None:
            raise vendor.LLMException("text", status_code=codes[name])

        monkeypatch.setattr(engine._datadist.cache_manager, "pull_blocks", pull)
        monkeypatch.setattr(
            vendor.LLMDataDist, "link_clusters", lambda *args, **kwargs: (codes.LLM_SUCCESS, [])
        )
        engine.link(WorkerEndpoint(cluster_id=9, host="127.0.0.1", engine_port=1, control_port=0))
        with pytest.raises(kind, match=f"ended with {name}: text: ") as caught:
            engine.pull(9, plan(1), [1], [2])
        assert type(caught.value) is kind
        engine.close()


def test_long_block_lists_are_pulled_in_pieces(
    vendor: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ConnectorConfig()
    backend = ascend.AscendBackend(config, CPU)
    backend.max_blocks_per_call = 3
    engine = DataDistEngine(config, backend, 7, [], False)
    engine._caches = [object()]
    pulls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        engine._datadist.cache_manager,
        "pull_blocks",
        lambda key, cache, src, dst, **options: pulls.append((src, dst, options)),
    )
    engine.pull(9, plan(1), list(range(7)), list(range(10, 17)))
    options = {"tensor_num_per_layer": 1}
    assert pulls == [
        ([0, 1, 2], [10, 11, 12], options),
        ([3, 4, 5], [13, 14, 15], options),
        ([6], [16], options),
    ]
    engine.close()


class TestFence:
    def test_host_tensors_have_none(self, vendor: ModuleType) -> None:
        assert ascend.AscendBackend(ConnectorConfig(), CPU).record_fence() is None

    def test_event_is_recorded_here_and_waited_for_there(
        self, vendor: ModuleType, npu: FakeNpu
    ) -> None:
        fence = ascend.AscendBackend(ConnectorConfig(), NPU).record_fence()
        assert fence is not None
        waiting = threading.Thread(target=fence.wait)
        waiting.start()
        assert npu.calls[0] == "record on MainThread"
        waiting.join(0.05)
        assert waiting.is_alive()
        npu.done.set()
        waiting.join(20)
        assert npu.calls[1:] == ["set_device 3", "synchronized"]

    def test_event_is_asked_without_waiting(self, vendor: ModuleType, npu: FakeNpu) -> None:
        fence = ascend.AscendBackend(ConnectorConfig(), NPU).record_fence()
        assert fence is not None
        assert not fence.is_done()
        npu.done.set()
        assert fence.is_done()
        assert npu.calls[1:] == ["set_device 3"] * 2
