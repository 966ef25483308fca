"""What two engines must have in common before KV moves between them.

Built from the vLLM configuration and, for geometry, from the KV tensors that the workers
registered: specs change their attribute names with nearly every vLLM release, tensors do not lie.
"""

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_llmdd_connector.layout.kv_layout import GroupGeometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Set by the loader or the machine, not by what the model computes.
_VOLATILE_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "_attn_implementation",
    }
)


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Compared field by field; the first difference is named in the refusal, with both values."""

    protocol_version: int
    model: str
    """Last component of the model's path or hub name."""
    model_config: str
    """Hash of the model's own configuration: heads, head size, layers, positions, and so on."""
    dtype: str
    cache_dtype: str
    tensor_parallel_size: int
    speculative: str
    """Method and draft length, or ``none``: draft layers have KV too."""
    groups: tuple[GroupGeometry, ...]
    kv_format: str
    """Attention backends, which say how the bytes inside a block are laid out."""
    integrity: str = "off"
    """The option: D expects the checksums that P computes."""


def first_difference(local: Fingerprint, peer: Fingerprint) -> str | None:
    """One sentence on the first field that differs, or None when the two can exchange KV."""
    for name in Fingerprint.__struct_fields__:
        ours, theirs = getattr(local, name), getattr(peer, name)
        if ours != theirs:
            if name == "groups":
                return _group_difference(local.groups, peer.groups)
            if name == "kv_format":
                return _format_difference(ours, theirs)
            return f"{name} differs: local {_short(ours)}, peer {_short(theirs)}"
    return None


def _group_difference(local: tuple[GroupGeometry, ...], peer: tuple[GroupGeometry, ...]) -> str:
    if len(local) != len(peer):
        return f"number of KV cache groups differs: local {len(local)}, peer {len(peer)}"
    for index, (ours, theirs) in enumerate(zip(local, peer, strict=True)):
        for name in GroupGeometry.__struct_fields__:
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine != other:
                return (
                    f"{name} of KV cache group {index} differs: local {_short(mine)}, "
                    f"peer {_short(other)}"
                )
    return "KV cache groups differ"


def _format_difference(local: str, peer: str) -> str:
    return (
        f"kv_format differs: local {_short(local)}, peer {_short(peer)}, attention backends whose "
        "blocks hold the same KV as other bytes; choose one --attention-backend for both, on CPUs "
        "machines with the same instructions"
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def model_facts(vllm_config: "VllmConfig") -> dict[str, Any]:
    """The fields of ``Fingerprint`` that come from vLLM's configuration."""
    model = vllm_config.model_config
    spec = vllm_config.speculative_config
    dtype = str(model.dtype).removeprefix("torch.")
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return {
        "model": os.path.basename(str(model.model).rstrip("/")),
        "model_config": _config_hash(model.hf_config.to_dict()),
        "dtype": dtype,
        "cache_dtype": dtype if cache_dtype == "auto" else cache_dtype,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "speculative": f"{spec.method}:{spec.num_speculative_tokens}" if spec else "none",
    }


def _config_hash(config: dict[str, Any]) -> str:
    kept = _without_volatile(config)
    text = json.dumps(kept, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            str(key): _without_volatile(inner)
            for key, inner in value.items()
            if key not in _VOLATILE_CONFIG_KEYS
        }
    if isinstance(value, list | tuple):
        return [_without_volatile(inner) for inner in value]
    return value
