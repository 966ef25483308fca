"""How vLLM lays out the bytes inside a block, beyond what its tensors' shapes and strides say."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.layout.groups import Group

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_PACKS_KEYS = "CPU_ATTN"


def kv_format(vllm_config: "VllmConfig", groups: Iterable[Group]) -> str:
    """The attention backends of the layers whose KV is transferred, by name and in order.

    vLLM's CPU backend packs keys for the instructions that it finds on the machine: tensors of one
    shape and stride, but other bytes, so its name goes with theirs, as ``CPU_ATTN/amx``.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = vllm_config.compilation_config.static_forward_context
    found = set()
    for group in groups:
        for name in group.layers:
            layer = layers.get(name)
            if isinstance(layer, AttentionLayerBase):
                found.add(_format_of(layer, group.block_size, vllm_config))
    return ",".join(sorted(found))


def _format_of(layer: Any, block_size: int, vllm_config: "VllmConfig") -> str:
    backend = str(layer.get_attn_backend().get_name())
    if backend != _PACKS_KEYS:
        return backend
    return f"{backend}/{_instructions(layer, block_size, vllm_config)}"


def _instructions(layer: Any, block_size: int, vllm_config: "VllmConfig") -> str:
    chosen = getattr(layer, "isa", "")
    if chosen:
        return str(chosen)
    # Older vLLM keeps them in its metadata builders only, which a connector is not shown.
    from vllm.v1.attention.backends import cpu_attn

    return str(
        cpu_attn._get_attn_isa(
            vllm_config.model_config.dtype,
            block_size,
            layer.head_size,
            vllm_config.cache_config.cache_dtype,
        )
    )
