"""What a block's bytes mean is compared where shapes and strides do not show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.fake_datadist import FakeDataDist
from fakes.rank import NO_LAYERS, Rank
from fakes.scheduler_side import make_side
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_llmdd_connector.control.fingerprint import Fingerprint
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.scheduler import scheduler
from vllm_llmdd_connector.worker.kv_format import kv_format


class OtherBackend:
    @staticmethod
    def get_name() -> str:
        return "OTHER"


class Layer(AttentionLayerBase):
    head_size = 64

    def __init__(self, backend: Any = CPUAttentionBackend, **fields: Any) -> None:
        self._backend = backend
        vars(self).update(fields)

    def get_attn_backend(self) -> Any:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError


def formats(layers: dict[str, Any], block_size: int = 128) -> str:
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    return kv_format(config, [Group(0, "FullAttentionSpec", block_size, tuple(layers))])


@pytest.mark.parametrize(("has_amx", "packed"), [(True, "amx"), (False, "vec")])
def test_cpu_caches_name_the_instructions_they_are_packed_for(
    monkeypatch: pytest.MonkeyPatch, has_amx: bool, packed: str
) -> None:
    """A P with AMX and a D without it once exchanged garbage: their tensors look the same."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setattr(
        "vllm.v1.attention.backends.cpu_attn.current_platform.get_cpu_architecture", lambda: None
    )
    assert formats({"a": Layer()}) == f"CPU_ATTN/{packed}"


def test_what_vllm_has_chosen_for_a_layer_counts() -> None:
    assert formats({"a": Layer(isa="neon")}) == "CPU_ATTN/neon"


def test_every_backend_of_the_layers_is_named_once() -> None:
    layers = {"a": Layer(isa="vec"), "b": Layer(OtherBackend), "c": Layer(isa="vec")}
    assert formats(layers) == "CPU_ATTN/vec,OTHER"


def test_handshake_of_a_worker_has_it(
    datadist: FakeDataDist, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NO_LAYERS.static_forward_context, "a", Layer(isa="amx"))
    rank = Rank("kv_producer", 0)
    assert rank.worker.handshake is not None
    assert rank.worker.handshake.kv_format == "CPU_ATTN/amx"
    rank.worker.shutdown()


def test_scheduler_side_compares_what_its_workers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Fingerprint] = []

    def keep(**fields: Any) -> Fingerprint:
        made.append(Fingerprint(**fields))
        return made[-1]

    monkeypatch.setattr(scheduler, "Fingerprint", keep)
    make_side("kv_producer", monkeypatch).shutdown()
    assert [fingerprint.kv_format for fingerprint in made] == ["CPU_ATTN/vec"]
