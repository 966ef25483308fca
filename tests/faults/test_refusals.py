"""What vLLM can be asked for beside the connector, and the sentence with which it does not start.

Everything here is decided before a prompt is taken, so no block is ever held for it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_spec import EngineSpec, vllm_config
from harness import VERSION
from loopback_connector import Handshake
from pairs import CONNECTOR
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_llmdd_connector.connector import LLMDataDistConnector
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.metadata import WorkerHandshake

ROLES = list(KVConnectorRole)
FULL: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 16,
    "dtype": torch.bfloat16,
}
MAMBA: dict[str, Any] = {"block_size": 16, "dtypes": (torch.float32,)}


def cache_of(*specs: KVCacheSpec, num_layers: int = 1) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layer.{i}.{n}" for n in range(num_layers)], spec)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def uniform(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    by_layer = {f"layer.0.{n}": spec for n, spec in enumerate(specs)}
    return UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=by_layer)


@pytest.fixture
def start(
    tmp_path: Path, datadist: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LLMDataDistConnector]]:
    """Build one side's connector from vLLM's own configuration, changed before that."""
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    started: list[LLMDataDistConnector] = []

    def build(
        side: KVConnectorRole,
        change: Callable[[Any], None] = lambda config: None,
        cache: KVCacheConfig | None = None,
        **fields: Any,
    ) -> LLMDataDistConnector:
        spec = EngineSpec(**{**CONNECTOR, "role": "kv_producer", **fields})
        config = vllm_config(spec, tmp_path)
        change(config)
        cache = cache or cache_of(FullAttentionSpec(**FULL))
        started.append(LLMDataDistConnector(config, side, cache))
        return started[-1]

    yield build
    for connector in started:
        connector.shutdown()


def set_parallel(**sizes: Any) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        for name, value in sizes.items():
            setattr(config.parallel_config, name, value)

    return change


def sleep_mode(config: Any) -> None:
    config.model_config.enable_sleep_mode = True


def own_scales(config: Any) -> None:
    """An option of vLLM until 0.2x only; pydantic takes no field that it has not."""
    object.__setattr__(config.cache_config, "calculate_kv_scales", True)


OPTIONS = {
    "--pipeline-parallel-size": (
        set_parallel(pipeline_parallel_size=2),
        "pipeline_parallel_size is 2; LLMDataDistConnector supports 1, set it to 1",
    ),
    "--decode-context-parallel-size": (
        set_parallel(decode_context_parallel_size=2),
        "decode_context_parallel_size is 2; LLMDataDistConnector supports 1, set it to 1",
    ),
    "--prefill-context-parallel-size": (
        set_parallel(prefill_context_parallel_size=4),
        "prefill_context_parallel_size is 4; LLMDataDistConnector supports 1, set it to 1",
    ),
    "--nnodes": (
        set_parallel(nnodes=2),
        "one engine's ranks are on 2 machines",
    ),
    "--enable-sleep-mode": (sleep_mode, "leave --enable-sleep-mode out"),
    "--calculate-kv-scales": (own_scales, "leave --calculate-kv-scales out"),
    "--enable-dbo": (
        set_parallel(enable_dbo=True),
        "set push to false in kv_connector_extra_config, or leave --enable-dbo",
    ),
    "--ubatch-size": (
        set_parallel(ubatch_size=2),
        "set push to false in kv_connector_extra_config, or leave --enable-dbo",
    ),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("option", OPTIONS)
def test_s38_refused_option(
    start: Callable[..., LLMDataDistConnector], option: str, role: KVConnectorRole
) -> None:
    change, sentence = OPTIONS[option]
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=sentence) as refusal:
        start(role, change)
    assert "\n" not in str(refusal.value)
    assert threading.active_count() == threads


def test_parts_of_a_batch_do_not_matter_where_nothing_is_pushed(
    start: Callable[..., LLMDataDistConnector],
) -> None:
    """A layer is sent after its first mark, so only a P that pushes must not have several."""
    change = set_parallel(enable_dbo=True)
    for fields in ({"role": "kv_consumer"}, {"extra_config": {"push": False}}):
        start(KVConnectorRole.SCHEDULER, change, **fields)


def other_kinds() -> dict[str, KVCacheSpec]:
    """Every kind of cache of this vLLM that is not attention over a prompt's own blocks."""
    found: dict[str, KVCacheSpec] = {
        "mamba": MambaSpec(**MAMBA, shapes=((4, 4),)),
        "mamba of two shapes": uniform(
            MambaSpec(**MAMBA, shapes=((4, 4),)), MambaSpec(**MAMBA, shapes=((2, 8),))
        ),
    }
    for name, fields in (
        ("CrossAttentionSpec", FULL),
        ("EncoderOnlyAttentionSpec", FULL),
        ("CircularBufferSpec", FULL),
        ("RSWASpec", FULL | {"rswa_window": 8}),
    ):
        kind = getattr(kv_cache_interface, name, None)
        if kind is not None:
            found[name] = kind(**fields)
            found[f"{name} of a group of several sizes"] = uniform(
                FullAttentionSpec(**FULL), kind(**fields)
            )
    return found


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("kind", other_kinds())
@pytest.mark.parametrize("is_second", [False, True])
def test_s20_s40_refused_cache(
    start: Callable[..., LLMDataDistConnector], kind: str, role: KVConnectorRole, is_second: bool
) -> None:
    """State of a whole sequence is no block of tokens: as such it would be wrong at D."""
    spec = other_kinds()[kind]
    specs = [FullAttentionSpec(**FULL), spec] if is_second else [spec]
    with pytest.raises(ConfigError, match=r"cannot be transferred; use a model whose groups"):
        start(role, cache=cache_of(*specs))


@pytest.mark.skipif(VERSION >= (0, 30), reason="vLLM 0.30 can be told of a failure")
def test_refused_windows_in_a_group_of_several_sizes(
    start: Callable[..., LLMDataDistConnector],
) -> None:
    windows = [
        SlidingWindowSpec(**FULL | {"head_size": size}, sliding_window=24) for size in (16, 32)
    ]
    with pytest.raises(ConfigError, match="cannot be told"):
        start(KVConnectorRole.SCHEDULER, cache=cache_of(uniform(*windows)), role="kv_consumer")


class TestDataParallel:
    """Each rank has an engine, a control port and clusters of its own."""

    def test_s39_refused_port_of_another_rank(
        self, start: Callable[..., LLMDataDistConnector]
    ) -> None:
        base = free_ports(3)

        def start_rank(rank: int) -> int:
            connector = start(
                KVConnectorRole.SCHEDULER,
                set_parallel(data_parallel_rank=rank),
                extra_config={"control_port": base},
            )
            port: int = connector._scheduler_side._server.port
            return port

        assert [start_rank(rank) for rank in range(3)] == [base, base + 1, base + 2]
        with pytest.raises(ConfigError, match=f"port {base + 1} on 127.0.0.1 is in use"):
            start_rank(1)

    def test_s39_refused_rank_beyond_the_last_port(
        self, start: Callable[..., LLMDataDistConnector]
    ) -> None:
        """ZeroMQ took 65537 for port 1, and the server listened where no D looked for it."""
        with pytest.raises(
            ConfigError, match="control_port 65535 plus data parallel rank 2 is 65537"
        ):
            start(
                KVConnectorRole.SCHEDULER,
                set_parallel(data_parallel_rank=2),
                extra_config={"control_port": 65535},
            )


def free_ports(count: int) -> int:
    """The first of ``count`` neighbouring ports that nobody has."""
    for first in range(20000, 30000, count):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def test_s33_refused_second_place_in_a_multi_connector(tmp_path: Path, datadist: Any) -> None:
    """vLLM hands all children the handshake of the first that has one."""
    first = {
        "kv_connector": "LoopbackConnector",
        "kv_connector_module_path": "loopback_connector",
        "kv_role": "kv_both",
    }
    ours = {
        "kv_connector": CONNECTOR["connector"],
        "kv_connector_module_path": CONNECTOR["module_path"],
        "kv_role": "kv_consumer",
    }
    spec = EngineSpec(connector="MultiConnector", extra_config={"connectors": [first, ours]})
    cache = cache_of(FullAttentionSpec(**FULL))
    both = MultiConnector(vllm_config(spec, tmp_path), KVConnectorRole.SCHEDULER, cache)
    with pytest.raises(ConfigError, match="in a MultiConnector list it as the first connector"):
        both.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(0)})


@pytest.mark.parametrize(
    ("extra_config", "sentence"),
    [
        ({"engine": "ascend"}, "engine 'ascend'"),
        ({"engine": "cuda"}, "Invalid enum value 'cuda'"),
        ({"host": "0.0.0.0"}, "which peers cannot dial"),
        ({"host": "192.0.2.1", "allow_plaintext": True}, "set host to an address of this machine"),
        ({"host": "192.0.2.1"}, "keys_dir is empty"),
        ({"keys_dir": "/nowhere"}, "/nowhere"),
        ({"control_prot": 1}, "did you mean 'control_port'"),
    ],
)
def test_refused_extra_config(
    make_engine: Any, datadist: Any, extra_config: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_engine(**CONNECTOR, role="kv_producer", extra_config=extra_config)


class TestTensors:
    """What the worker is given to register."""

    @pytest.mark.parametrize(
        ("tensor", "sentence"),
        [
            (torch.empty(8, 2, 16, 32, device="meta"), "is on device meta"),
            (torch.empty(7, 64), "no multiple of the 8 blocks"),
            (torch.empty(8, 128)[:, ::2], "has gaps inside a block"),
        ],
        ids=["device", "number of blocks", "gaps"],
    )
    def test_refused_tensor(
        self,
        start: Callable[..., LLMDataDistConnector],
        tensor: torch.Tensor,
        sentence: str,
    ) -> None:
        worker = start(KVConnectorRole.WORKER)
        with pytest.raises(ConfigError, match=sentence):
            worker.register_kv_caches({"layer.0.0": tensor})

    def test_refused_missing_rank(self, start: Callable[..., LLMDataDistConnector]) -> None:
        """A worker that sent no handshake would leave D without its heads."""
        connector = start(KVConnectorRole.SCHEDULER, tp_size=2)
        parts: Any = {
            0: WorkerHandshake(tp_rank=0, endpoint=None, groups=(), can_push=False, kv_format="")
        }
        with pytest.raises(ConfigError, match="1 of 2 workers sent a handshake"):
            connector.set_xfer_handshake_metadata(parts)


class TestNothingIsLeft:
    """A start that was refused gives its port and threads back: vLLM does not ask the connector to
    shut down, and collecting an open context waits for its sockets without end."""

    def test_after_the_handshake(self, start: Callable[..., LLMDataDistConnector]) -> None:
        port, threads = free_ports(1), threading.active_count()
        connector = start(KVConnectorRole.SCHEDULER, tp_size=2, extra_config={"control_port": port})
        with pytest.raises(ConfigError):
            connector.set_xfer_handshake_metadata({})
        socket.create_server(("127.0.0.1", port)).close()
        assert threading.active_count() == threads

    def test_in_the_constructor(
        self, start: Callable[..., LLMDataDistConnector], tmp_path: Path
    ) -> None:
        """The folder of traces is opened after the port."""
        port, threads = free_ports(1), threading.active_count()
        blocked = tmp_path / "file"
        blocked.touch()
        with pytest.raises(ConfigError, match="trace_dir: cannot write"):
            start(
                KVConnectorRole.SCHEDULER,
                extra_config={"control_port": port, "trace_dir": str(blocked / "traces")},
            )
        socket.create_server(("127.0.0.1", port)).close()
        assert threading.active_count() == threads


def test_sleep_mode_of_later_versions_is_declined_too() -> None:
    """vLLM 0.33 asks the class."""
    config: Any = SimpleNamespace()
    assert not LLMDataDistConnector.supports_sleep_mode(config)
