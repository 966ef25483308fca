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


def test_several_groups_are_refused_where_vllm_cannot_be_told_of_failures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connector_module, "KVConnectorTransferResults", None)
    connector_module._check_failure_route(1)
    with pytest.raises(ConfigError, match=r"2 KV cache groups.* use vLLM 0\.30 or newer"):
        connector_module._check_failure_route(2)


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
