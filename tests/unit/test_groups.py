"""``transfer_groups``: which of vLLM's KV cache groups take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.layout.groups import Group, transfer_groups


def group(kind: str, block_size: int, *layers: str) -> Any:
    spec = type(kind, (), {"block_size": block_size})()
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers))


FULL = group("FullAttentionSpec", 16, "a", "b")
WINDOW = group("SlidingWindowSpec", 32, "c")
MAMBA = group("MambaSpec", 1, "m")


def config(*groups: Any, **fields: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups), **fields)


def test_all_groups_take_part_where_vllm_does_not_say() -> None:
    assert transfer_groups(config(FULL, WINDOW)) == [
        Group(0, "FullAttentionSpec", 16, ("a", "b")),
        Group(1, "SlidingWindowSpec", 32, ("c",)),
    ]


def test_groups_that_vllm_names_keep_their_numbers() -> None:
    (only,) = transfer_groups(config(FULL, WINDOW, transfer_group_ids=(1,)))
    assert (only.group_id, only.layers) == (1, ("c",))


def test_unsupported_kind_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="group 1 is of kind MambaSpec"):
        transfer_groups(config(FULL, MAMBA))


def test_unsupported_kind_that_is_not_transferred_does_not_matter() -> None:
    assert len(transfer_groups(config(FULL, MAMBA, transfer_group_ids=(0,)))) == 1
