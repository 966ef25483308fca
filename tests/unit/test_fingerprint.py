"""Fingerprints: the first difference is named with both values; volatile settings do not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fakes.builders import make_fingerprint, make_geometry

from vllm_llmdd_connector.control.fingerprint import first_difference, model_facts


def test_equal_fingerprints_have_no_difference() -> None:
    assert first_difference(make_fingerprint(), make_fingerprint()) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "other"}, "model differs: local 'tiny', peer 'other'"),
        ({"dtype": "float16"}, "dtype differs: local 'bfloat16', peer 'float16'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size differs: local 1, peer 2"),
        ({"speculative": "ngram:3"}, "speculative differs: local 'none', peer 'ngram:3'"),
        (
            {"kv_format": "CPU_ATTN/amx"},
            "kv_format differs: local 'CPU_ATTN/vec', peer 'CPU_ATTN/amx', attention backends "
            "whose blocks hold the same KV as other bytes; choose one --attention-backend for "
            "both, on CPUs machines with the same instructions",
        ),
        ({"integrity": "full"}, "integrity differs: local 'off', peer 'full'"),
        ({"groups": ()}, "number of KV cache groups differs: local 1, peer 0"),
        (
            {"groups": (make_geometry(block_size=32),)},
            "block_size of KV cache group 0 differs: local 16, peer 32",
        ),
        (
            {"groups": (make_geometry(layers=("layer0",)),)},
            "layers of KV cache group 0 differs: local ('layer0', 'layer1'), peer ('layer0',)",
        ),
    ],
)
def test_difference_is_one_sentence_with_both_values(
    changes: dict[str, Any], sentence: str
) -> None:
    assert first_difference(make_fingerprint(), make_fingerprint(**changes)) == sentence


def test_sentence_stays_short_with_many_layers() -> None:
    many = make_geometry(layers=tuple(f"model.layers.{i}.attn" for i in range(100)))
    sentence = first_difference(make_fingerprint(), make_fingerprint(groups=(many,)))
    assert sentence is not None
    assert len(sentence) < 350


def facts(model: str = "org/tiny", spec: Any = None, **config: Any) -> dict[str, Any]:
    hf_config = {"hidden_size": 64, "rope": {"theta": 1e4}, **config}
    return model_facts(
        SimpleNamespace(
            model_config=SimpleNamespace(
                model=model,
                hf_config=SimpleNamespace(to_dict=lambda: hf_config),
                dtype="torch.bfloat16",
            ),
            speculative_config=spec,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=2),
        )
    )


class TestModelFacts:
    def test_fields_come_from_vllm_s_configuration(self) -> None:
        found = facts()
        assert found["model"] == "tiny"
        assert found["dtype"] == "bfloat16"
        assert found["tensor_parallel_size"] == 2
        assert found["speculative"] == "none"

    def test_local_folder_and_hub_name_of_one_model_agree(self) -> None:
        assert facts("/data/models/tiny/") == facts("org/tiny")

    @pytest.mark.parametrize("volatile", ["_name_or_path", "transformers_version", "torch_dtype"])
    def test_loader_settings_do_not_count_at_any_depth(self, volatile: str) -> None:
        plain = facts(text={"layers": 2}, parts=[{"a": 1}])
        loaded = facts(text={"layers": 2, volatile: "x"}, parts=[{"a": 1, volatile: "y"}])
        assert plain == loaded

    def test_nested_model_setting_counts(self) -> None:
        assert facts(rope={"theta": 1e6})["model_config"] != facts()["model_config"]

    def test_s28_refused_draft_method_or_length_that_differs(self) -> None:
        spec = SimpleNamespace(method="ngram", num_speculative_tokens=3)
        assert facts(spec=spec)["speculative"] == "ngram:3"
