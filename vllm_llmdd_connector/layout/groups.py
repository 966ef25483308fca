"""KV cache groups of vLLM's configuration: which take part, their layers and block sizes."""

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_llmdd_connector.errors import ConfigError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SUPPORTED_KINDS = frozenset(
    {
        "FullAttentionSpec",
        "TQFullAttentionSpec",
        "SinkFullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
    }
)
_SEVERAL_SIZES = "UniformTypeKVCacheSpecs"
"""Of a group whose layers have specs of one type, but several sizes; it wraps them."""


class Group(NamedTuple):
    """One KV cache group that is transferred."""

    group_id: int
    """Its number in vLLM, which also counts groups that are not transferred."""
    kind: str
    """Name of its layers' spec in vLLM, or names."""
    block_size: int
    """Tokens in a block."""
    layers: tuple[str, ...]
    window: int = 0
    """Tokens that a token attends to, itself included; 0: all before it."""
    chunk: int = 0
    """Tokens in a chunk of chunked local attention; 0: no chunks."""

    def first_block_needed(self, num_tokens: int) -> int:
        """Position of the first block that computing the last of ``num_tokens`` tokens reads."""
        first_token = max(0, num_tokens - self.window) if self.window else 0
        if self.chunk:
            first_token = (num_tokens - 1) // self.chunk * self.chunk
        return first_token // self.block_size


def transfer_groups(kv_cache_config: "KVCacheConfig") -> list[Group]:
    """The groups whose blocks a request needs at D.

    Raises:
        ConfigError: the model has a kind of cache that cannot be transferred.
    """
    all_groups = kv_cache_config.kv_cache_groups
    # Since 0.29 vLLM says which groups take part; before, all do.
    ids = getattr(kv_cache_config, "transfer_group_ids", None)
    groups = []
    for group_id in range(len(all_groups)) if ids is None else ids:
        group = all_groups[group_id]
        specs = _layer_specs(group.kv_cache_spec)
        kinds = sorted({type(spec).__name__ for spec in specs})
        for kind in kinds:
            if kind not in _SUPPORTED_KINDS:
                raise ConfigError(
                    f"KV cache group {group_id} is of kind {kind}, which cannot be transferred; "
                    f"use a model whose groups are all of {', '.join(sorted(_SUPPORTED_KINDS))}"
                )
        groups.append(_group(group_id, "+".join(kinds), group, specs[0]))
    return groups


def _layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers: one for all, or each one's own."""
    if type(spec).__name__ != _SEVERAL_SIZES:
        return [spec]
    return list(spec.kv_cache_specs.values())


def _group(group_id: int, kind: str, group: Any, inner: Any) -> Group:
    return Group(
        group_id,
        kind,
        group.kv_cache_spec.block_size,
        tuple(group.layer_names),
        window=getattr(inner, "sliding_window", None) or 0,
        chunk=getattr(inner, "attention_chunk_size", None) or 0,
    )
