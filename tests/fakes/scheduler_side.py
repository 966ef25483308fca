"""A scheduler side with its real sockets and threads, and of vLLM only what it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fakes.block_pool import FakeBlockPool
from fakes.builders import make_endpoint, make_geometry, make_model_facts
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.metadata import WorkerHandshake
from vllm_llmdd_connector.scheduler import scheduler as module
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector


def make_side(
    role: str, monkeypatch: pytest.MonkeyPatch, shutdown_timeout: int = 0, **options: Any
) -> SchedulerConnector:
    """One whole scheduler side; ``options`` are the connector's."""
    monkeypatch.setattr(module, "model_facts", lambda vllm_config: make_model_facts())
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            engine_id=f"engine of {role}",
            kv_role=role,
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=0),
        speculative_config=None,
        shutdown_timeout=shutdown_timeout,
    )
    spec = type("FullAttentionSpec", (), {"block_size": 16})()
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer0"])
    cache: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=8)
    side = SchedulerConnector(config, cache, ConnectorConfig(**options))
    endpoint = make_endpoint() if role == "kv_producer" else None
    side.set_handshake({0: WorkerHandshake(0, endpoint, (make_geometry(),), True, "CPU_ATTN/vec")})
    pool: Any = FakeBlockPool(8)
    side.bind_block_pool(pool)
    return side
