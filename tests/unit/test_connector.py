"""``LLMDataDistConnector``'s own decisions; the hooks themselves are driven by a real scheduler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.block_pool import FakeBlockPool
from fakes.clock import wait_for
from fakes.requests import make_request
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_llmdd_connector import connector as connector_module
from vllm_llmdd_connector.connector import LLMDataDistConnector
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.metrics import LlmddStats
from vllm_llmdd_connector.worker.completion import Drained


def parallel(**sizes: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**sizes))


@pytest.mark.parametrize(
    "name",
    ["pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"],
)
def test_unsupported_parallelism_is_refused_by_name_and_value(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 2; .* set it to 1"):
        connector_module._check_topology(parallel(**{name: 2}))


def test_sizes_that_a_release_does_not_know_are_one() -> None:
    connector_module._check_topology(parallel(tensor_parallel_size=4))


@pytest.mark.parametrize(
    ("role", "push", "is_refused"),
    [
        ("producer", True, True),
        ("both", True, True),
        ("producer", False, False),
        ("consumer", True, False),
    ],
)
def test_micro_batches_are_refused_where_layers_are_pushed(
    monkeypatch: pytest.MonkeyPatch, role: str, push: bool, is_refused: bool
) -> None:
    """vLLM reports a layer after each micro-batch; D got blocks that were not computed."""
    for side in ("SchedulerConnector", "_check_failure_route"):
        monkeypatch.setattr(connector_module, side, lambda *args: None)
    config = parallel(use_ubatching=True)
    config.model_config = config.cache_config = SimpleNamespace()
    config.kv_transfer_config = SimpleNamespace(
        is_kv_producer=role != "consumer",
        is_kv_consumer=role != "producer",
        kv_connector_extra_config={"push": push},
    )
    with pytest.raises(ConfigError, match="enable-dbo") if is_refused else nullcontext():
        LLMDataDistConnector(config, KVConnectorRole.SCHEDULER, cache_of("FullAttentionSpec"))


def cache_of(*kinds: str) -> Any:
    groups = [
        SimpleNamespace(
            kv_cache_spec=type(kind, (), {"block_size": 16})(), layer_names=[f"layer.{number}"]
        )
        for number, kind in enumerate(kinds)
    ]
    return SimpleNamespace(kv_cache_groups=groups)


@pytest.mark.parametrize(
    "kinds",
    [
        ("FullAttentionSpec", "SlidingWindowSpec"),
        ("FullAttentionSpec", "FullAttentionSpec"),
        ("SlidingWindowSpec",),
        ("SlidingWindowMLASpec",),
        ("ChunkedLocalAttentionSpec",),
    ],
)
def test_caches_are_refused_where_vllm_cannot_be_told_of_failures(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    """A single windowed group too: its null block stands in the tables of all requests, and one
    failed load would have made vLLM truncate them all."""
    connector_module._check_failure_route(cache_of(*kinds))
    monkeypatch.setattr(connector_module, "KVConnectorTransferResults", None)
    connector_module._check_failure_route(cache_of("FullAttentionSpec"))
    connector_module._check_failure_route(cache_of("MLAAttentionSpec"))
    with pytest.raises(ConfigError, match=r"cannot be told.* use vLLM 0\.30 or newer"):
        connector_module._check_failure_route(cache_of(*kinds))


def test_hybrid_models_are_supported_and_no_abstract_hook_is_left() -> None:
    assert issubclass(LLMDataDistConnector, KVConnectorBase_V1)
    assert issubclass(LLMDataDistConnector, SupportsHMA)
    assert not inspect.isabstract(LLMDataDistConnector)


def test_sleep_mode_is_declined() -> None:
    config: Any = SimpleNamespace()
    assert LLMDataDistConnector.supports_sleep_mode(config) is False


@pytest.mark.parametrize(("options", "is_piecewise"), [({}, True), ({"push": False}, False)])
def test_full_graphs_are_declined_where_layers_are_pushed(
    options: dict[str, Any], is_piecewise: bool
) -> None:
    """Their replay calls no layer hook."""
    asked = LLMDataDistConnector.requires_piecewise_for_cudagraph(options)
    assert asked is is_piecewise


def test_layer_hooks_and_voids_reach_the_worker() -> None:
    calls: list[Any] = []
    worker: Any = SimpleNamespace(
        apply_voids=lambda step: calls.append(("void", step.voids)),
        layer_computed=lambda name: calls.append(("layer", name)),
        forward_ended=lambda: calls.append("end"),
    )
    connector = object.__new__(LLMDataDistConnector)
    connector._scheduler, connector._worker = None, worker
    nothing: Any = None
    connector.handle_preemptions(StepMessage(voids=[7]))
    connector.on_kv_cache_written("a")
    connector.save_kv_layer("a", nothing, nothing)
    connector.wait_for_save()
    assert calls == [("void", [7]), ("layer", "a"), ("layer", "a"), "end"]


def test_statistics_are_rebuilt_from_their_data() -> None:
    built = LLMDataDistConnector.build_kv_connector_stats({"counts": {"recv_requests": 2}})
    assert isinstance(built, LlmddStats)
    assert built.reduce() == {"recv_requests": 2}


@pytest.fixture
def make_connector() -> Iterator[Callable[[str], LLMDataDistConnector]]:
    """Connectors of the scheduler process, for a ``kv_role``."""
    made: list[LLMDataDistConnector] = []

    def make(kv_role: str) -> LLMDataDistConnector:
        transfer = SimpleNamespace(
            engine_id="engine",
            kv_role=kv_role,
            is_kv_producer=kv_role != "kv_consumer",
            is_kv_consumer=kv_role != "kv_producer",
            # No lease outlives its first look at the clock.
            kv_connector_extra_config={"lease_s": 1e-3, "max_lease_s": 1e-3},
        )
        config: Any = SimpleNamespace(
            kv_transfer_config=transfer,
            model_config=SimpleNamespace(),
            cache_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=0),
            speculative_config=None,
        )
        cache = cache_of("FullAttentionSpec")
        cache.num_blocks = 8
        made.append(LLMDataDistConnector(config, KVConnectorRole.SCHEDULER, cache))
        return made[-1]

    yield make
    for connector in made:
        connector.shutdown()


def as_before_030(connector: LLMDataDistConnector, pool: Any) -> None:
    connector.bind_gpu_block_pool(pool)


def as_since_030(connector: LLMDataDistConnector, pool: Any) -> None:
    manager: Any = SimpleNamespace(block_pool=pool)
    connector.bind_kv_cache_manager(manager)


BINDINGS = [
    as_before_030,
    pytest.param(
        as_since_030,
        marks=pytest.mark.skipif(
            not hasattr(KVConnectorBase_V1, "bind_kv_cache_manager"), reason="vLLM before 0.30"
        ),
    ),
]


def new_request(connector: LLMDataDistConnector) -> None:
    connector.on_new_request(make_request("other", [1]))


def next_step(connector: LLMDataDistConnector) -> None:
    output: Any = SimpleNamespace()
    assert connector.build_connector_meta(output) == StepMessage()


class TestBlockPool:
    """P's scheduler side takes references in vLLM's pool and gives them back in its hooks."""

    @pytest.mark.parametrize("call_hook", [new_request, next_step])
    @pytest.mark.parametrize("bind", BINDINGS)
    def test_blocks_are_held_by_the_bound_pool_and_come_back_at_the_next_hook(
        self,
        make_connector: Callable[[str], LLMDataDistConnector],
        bind: Callable[[LLMDataDistConnector, Any], None],
        call_hook: Callable[[LLMDataDistConnector], None],
    ) -> None:
        connector, pool = make_connector("kv_producer"), FakeBlockPool(8)
        bind(connector, pool)
        pool.allocate((1, 2))
        request = make_request(
            "p", range(32), {"do_remote_decode": True}, status="FINISHED_STOPPED"
        )
        is_delayed, params = connector.request_finished_all_groups(request, ([1, 2],))
        pool.end_request((1, 2))
        assert not is_delayed
        assert params is not None
        assert pool.in_use == [1, 2]

        def have_come_back() -> bool:
            call_hook(connector)
            return not pool.in_use

        wait_for(have_come_back, "the blocks")
        assert pool.freed == [2, 1]

    def test_decode_server_takes_no_notice_of_the_pool(
        self, make_connector: Callable[[str], LLMDataDistConnector]
    ) -> None:
        connector, pool = make_connector("kv_consumer"), FakeBlockPool(8)
        as_before_030(connector, pool)
        assert pool.touched == pool.freed == []


def test_no_request_is_ever_reported_as_sent() -> None:
    """vLLM asserts that it waits for such a report; ours are over before their blocks are."""
    drained = Drained(received={"r"}, failed={"f": "torn"})
    connector = object.__new__(LLMDataDistConnector)
    connector._scheduler = None
    worker: Any = SimpleNamespace(poll=lambda: drained, take_failed_blocks=set)
    connector._worker = worker
    assert connector.get_finished({"p"}) == (None, {"r", "f"})
    results = connector.get_transfer_results({"p"})
    assert not results.finished_sending
    assert results.finished_recving == {"r", "f"}
    assert results.failed_recving == {"f"}
