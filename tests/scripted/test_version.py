"""Says which vLLM the scripted tests really ran on."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
import vllm


def test_the_version_asked_for_is_imported() -> None:
    expected = os.environ.get("SCRIPTED_VLLM_VERSION", "0.32.0")
    assert vllm.__version__.split("+")[0] == expected


@pytest.mark.parametrize(
    "name",
    [
        "vllm.v1.engine.core",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.core.sched.async_scheduler",
        "vllm.v1.worker.kv_connector_model_runner_mixin",
        "vllm.distributed.kv_transfer.kv_connector.factory",
    ],
)
def test_every_module_comes_from_the_tree_asked_for(name: str) -> None:
    root = os.environ.get("SCRIPTED_VLLM_TREE", str(Path(vllm.__file__).parent.parent))
    path = import_module(name).__file__
    assert path is not None
    assert Path(path).is_relative_to(root)
