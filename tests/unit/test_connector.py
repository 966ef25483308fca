"""``LLMDataDistConnector``'s own decisions; the hooks themselves are driven by a real scheduler."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

from vllm_llmdd_connector import connector as connector_module
from vllm_llmdd_connector.connector import LLMDataDistConnector
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.metrics import LlmddStats


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


def test_statistics_are_rebuilt_from_their_data() -> None:
    built = LLMDataDistConnector.build_kv_connector_stats({"counts": {"recv_requests": 2}})
    assert isinstance(built, LlmddStats)
    assert built.reduce() == {"recv_requests": 2}
