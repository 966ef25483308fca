"""Settings of a scripted engine and the real vLLM configuration made from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kv_reference import KVModel
from vllm import ModelRegistry
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

_ARCHITECTURE = "ScriptedForCausalLM"
DTYPE = torch.bfloat16


class ScriptedForCausalLM(torch.nn.Module):
    """Satisfies vLLM's model registry, so that no model code is inspected; never instantiated."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        raise NotImplementedError

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One engine; the defaults give a single full-attention group and no connector."""

    connector: str | None = None
    """Connector class name; None builds an engine without one."""
    module_path: str | None = None
    """Module of the class; None takes the name from vLLM's registry."""
    role: str = "kv_both"
    load_failure_policy: str = "fail"
    extra_config: dict[str, Any] = field(default_factory=dict)
    engine_id: str | None = None

    block_size: int = 16
    num_blocks: int = 64
    """Blocks of the pool; vLLM keeps one of them as its null block."""
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    max_model_len: int = 512
    enable_prefix_caching: bool = True
    tp_size: int = 1
    sliding_window: int | None = None
    """Window of every second layer, which makes two KV cache groups."""
    num_layers: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16

    pipeline_depth: int = 1
    """Steps scheduled before an output is processed; 2 is vLLM's asynchronous scheduling."""
    device_lag: bool = False
    """KV is written only when the step's output is fetched, as on a device that runs behind."""
    zero_new_blocks: bool = False
    """The worker zeroes newly allocated blocks, as vLLM does for some models."""
    separate_storage: bool = False
    """Each layer has a storage of its own, whatever the vLLM version does."""
    model_name: str = "scripted"

    @property
    def model(self) -> KVModel:
        windows = tuple(
            self.sliding_window if layer % 2 else None for layer in range(self.num_layers)
        )
        return KVModel(windows=windows, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)

    @property
    def heads_per_rank(self) -> int:
        return self.num_kv_heads // self.tp_size

    def layer_names(self) -> list[str]:
        return [f"model.layers.{layer}.self_attn.attn" for layer in range(self.num_layers)]

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """The spec of each layer, as a worker of vLLM reports it."""
        common: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": self.heads_per_rank,
            "head_size": self.head_dim,
            "dtype": DTYPE,
        }
        return {
            name: FullAttentionSpec(**common)
            if window is None
            else SlidingWindowSpec(**common, sliding_window=window)
            for name, window in zip(self.layer_names(), self.model.windows, strict=True)
        }


def _model_config(spec: EngineSpec, directory: Path) -> ModelConfig:
    if _ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(_ARCHITECTURE, ScriptedForCausalLM)
    model = directory / spec.model_name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(
        json.dumps(
            {
                "architectures": [_ARCHITECTURE],
                "model_type": "llama",
                "hidden_size": spec.head_dim * spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "intermediate_size": 64,
                "num_hidden_layers": spec.num_layers,
                "num_attention_heads": spec.num_kv_heads,
                "num_key_value_heads": spec.num_kv_heads,
                "vocab_size": spec.model.vocab_size,
                "max_position_embeddings": 4096,
                "torch_dtype": "bfloat16",
            }
        )
    )
    return ModelConfig(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=spec.max_model_len,
        enforce_eager=True,
    )


def _kv_transfer_config(spec: EngineSpec) -> KVTransferConfig | None:
    if spec.connector is None:
        return None
    optional = {"engine_id": spec.engine_id} if spec.engine_id else {}
    return KVTransferConfig(
        kv_connector=spec.connector,
        kv_connector_module_path=spec.module_path,
        kv_role=spec.role,
        kv_load_failure_policy=spec.load_failure_policy,
        kv_connector_extra_config=dict(spec.extra_config),
        **optional,
    )


def vllm_config(spec: EngineSpec, directory: Path, rank: int = 0) -> VllmConfig:
    """The configuration that the engine core (rank 0) or a worker of this rank holds."""
    config = VllmConfig(
        model_config=_model_config(spec, directory),
        cache_config=CacheConfig(
            block_size=spec.block_size,
            enable_prefix_caching=spec.enable_prefix_caching,
            num_gpu_blocks_override=spec.num_blocks,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_num_seqs=spec.max_num_seqs,
            max_model_len=spec.max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
        ),
        parallel_config=ParallelConfig(tensor_parallel_size=spec.tp_size),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=_kv_transfer_config(spec),
    )
    # vLLM's CPU platform turns asynchronous scheduling off, whatever was asked for.
    config.scheduler_config.async_scheduling = spec.pipeline_depth > 1
    config.parallel_config.rank = rank
    return config


@contextmanager
def fixed_hash_seed() -> Iterator[None]:
    """Give all engines of the process one seed for block hashes; vLLM keeps it in a global."""
    previous = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = previous
