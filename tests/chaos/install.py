"""Puts the simulated modules where the connector's code and the fakes look for the real ones."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from engine_model import SimDataDist
from hub import Hub
from network import Network
from sim_threads import make_secrets, make_threading, make_time
from sim_zmq import SimWake, make_zmq
from vllm import forward_context
from vllm.config import vllm as vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state

_OURS = "vllm_llmdd_connector"
_PARTS = ("control", "scheduler", "worker", "metrics", "ids")
_REAL = {
    f"{_OURS}.control.metaserver",
    f"{_OURS}.control.keys",
    f"{_OURS}.scheduler.shutdown",
}
"""What a world has another way of, or nothing to do with."""
_FAKES = ["fakes.fake_datadist", "fakes.fake_push"]
_GLOBALS: list[tuple[Any, str]] = [
    (kv_transfer_state, "_KV_CONNECTOR_AGENT"),
    (parallel_state, "_TP"),
    (parallel_state, "_PP"),
    (forward_context, "_forward_context"),
    (vllm_config, "_current_vllm_config"),
]


class VllmGlobals:
    """vLLM's globals of one process, which others of the simulation must not see."""

    def __init__(self) -> None:
        self._values = [getattr(module, name, None) for module, name in _GLOBALS]

    def enter(self) -> None:
        self._exchange()

    def leave(self) -> None:
        self._exchange()

    def _exchange(self) -> None:
        for index, (module, name) in enumerate(_GLOBALS):
            namespace = vars(module)
            namespace[name], self._values[index] = self._values[index], namespace.get(name)


def _modules() -> list[ModuleType]:
    """All modules whose threads, sockets and clocks are to be simulated."""
    parts = [f"{_OURS}.{part}" for part in _PARTS]
    importlib.import_module(f"{_OURS}.connector")
    ours = [
        name
        for name in sorted(sys.modules)
        if any(name == part or name.startswith(f"{part}.") for part in parts)
    ]
    return [importlib.import_module(name) for name in [*ours, *_FAKES] if name not in _REAL]


@contextmanager
def installed(hub: Hub, network: Network, seed: str) -> Iterator[SimDataDist]:
    """Whatever is started in here lives in the simulated world; yields its LLM-DataDist."""
    stand_ins: dict[str, Any] = {
        "threading": make_threading(hub),
        "time": make_time(hub),
        "zmq": make_zmq(hub, network),
        "secrets": make_secrets(random.Random(f"secrets {seed}")),
        "Wake": lambda: SimWake(hub),
    }
    with ExitStack() as stack:
        for module in _modules():
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, stand_in))
        datadist = SimDataDist(hub)
        api = f"{_OURS}.worker.backend.load_api"
        stack.enter_context(mock.patch(api, return_value=datadist.api))
        yield datadist
