"""KV cache groups of vLLM's configuration: which take part, their layers and block sizes."""

from typing import TYPE_CHECKING, NamedTuple

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
        "UniformTypeKVCacheSpecs",
    }
)


class Group(NamedTuple):
    """One KV cache group that is transferred."""

    group_id: int
    """Its number in vLLM, which also counts groups that are not transferred."""
    kind: str
    block_size: int
    """Tokens in a block."""
    layers: tuple[str, ...]


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
        kind = type(group.kv_cache_spec).__name__
        if kind not in _SUPPORTED_KINDS:
            raise ConfigError(
                f"KV cache group {group_id} is of kind {kind}, which cannot be transferred; use a "
                f"model whose groups are all of {', '.join(sorted(_SUPPORTED_KINDS))}"
            )
        groups.append(
            Group(group_id, kind, group.kv_cache_spec.block_size, tuple(group.layer_names))
        )
    return groups
