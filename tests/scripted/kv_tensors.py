"""KV cache tensors as each vLLM version allocates them on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from engine_spec import DTYPE
from kv_reference import Words
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker import utils as worker_utils


def allocate(
    config: KVCacheConfig, vllm_config: VllmConfig, separate_storage: bool
) -> dict[str, torch.Tensor]:
    """Tensors ``(num_blocks, kv_heads, block_size, 2 * head_dim)`` by layer name."""
    if hasattr(worker_utils, "allocate_kv_cache"):
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        caches = worker_utils.allocate_kv_cache(config, torch.device("cpu"), layout)
    else:
        caches = _one_storage_per_tensor(config)
    if separate_storage:
        return {name: cache.clone() for name, cache in caches.items()}
    return dict(caches)


def _one_storage_per_tensor(config: KVCacheConfig) -> dict[str, torch.Tensor]:
    """The allocation of vLLM up to 0.28: layers of different groups share a tensor."""
    caches: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        raw = torch.zeros(tensor.size, dtype=torch.int8)
        for name in tensor.shared_by:
            spec: Any = next(
                group.kv_cache_spec for group in config.kv_cache_groups if name in group.layer_names
            )
            shape = (-1, spec.num_kv_heads, spec.block_size, 2 * spec.head_size)
            caches[name] = raw.view(DTYPE).view(shape)
    return caches


def as_words(cache: torch.Tensor) -> Words:
    """The same memory as 64-bit words: ``(block, head, position, word)``."""
    words: Words = cache.view(torch.int64).numpy().view(np.uint64)
    return words
