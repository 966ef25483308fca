"""The servers that benchmarks compare: who they are, how they are pinned, what they cost.

Every vLLM server has one processor to itself: P and the aggregated server the first, D the second.
Servers of arms that have no turn are stopped (SIGSTOP), since some spin when idle.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
EXAMPLE = BENCHMARKS.parent / "examples" / "disaggregated_prefill"
sys.path.insert(0, str(EXAMPLE))

from client import ask  # noqa: E402
from servers import (  # noqa: E402
    ProxySpec,
    Server,
    Servers,
    ServerSpec,
    free_port,
    raise_on_terminate,
)

__all__ = [
    "ARMS",
    "Arm",
    "Place",
    "Servers",
    "Setup",
    "ask",
    "length_arguments",
    "raise_on_terminate",
    "start_arms",
]

NIXL_ARMS: Mapping[str, str] = {"nixl": "NixlConnector", "nixl-push": "NixlPushConnector"}
ARMS = ("aggregated", "pull", "push", *NIXL_ARMS)
OUR_TIMES = "llmdd"
"""The folder of our own traces; those of NIXL_ARMS have the arm's name."""
NIXL_EXTRA_CONFIG: Mapping[str, Any] = {"num_threads": 0}
"""The best of NixlConnector's settings that were tried, see docs/performance.md. With all of
them its progress thread spins; no setting of the connector stops that thread."""
_LOOPBACK = "127.0.0.1"
_BLOCK_TOKENS = 128
_LEAST_BLOCKS = 128
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Arm:
    """One way to have a prompt answered."""

    name: str
    url: str
    servers: Sequence[Server]
    """Those that work for it, proxies included."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What its lines say of how it is set up, where there is a choice."""

    def alone(self) -> list[Arm]:
        """Each of its vLLM servers, to be asked without the others."""
        return [Arm(server.spec.name, server.url, [server]) for server in self.vllm_servers()]

    def cpu_s(self) -> float:
        """Processor seconds that its vLLM servers have used so far."""
        pids = [pid for server in self.vllm_servers() for pid in server.pids()]
        return sum(_ticks(pid) for pid in pids) / _TICKS_PER_S

    def vllm_servers(self) -> list[Server]:
        return [server for server in self.servers if isinstance(server.spec, ServerSpec)]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let its servers run, and stop them afterwards."""
        for server in self.servers:
            server.send(signal.SIGCONT)
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        for server in self.servers:
            server.send(signal.SIGSTOP)


@dataclass(frozen=True)
class Place:
    """Where a server runs, and how it is reached there."""

    cpu: str
    http_host: str = _LOOPBACK
    transfer_host: str = _LOOPBACK
    wrapper: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """What all servers have in common."""

    model: Path
    arguments: Sequence[str]
    times: Path
    """Where they write what server_requests.py reads, a folder for each connector."""
    prefill: Place = Place("0")
    decode: Place = Place("1")
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of this connector, at both sides."""

    def server(
        self,
        name: str,
        place: Place,
        transfer: dict[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> ServerSpec:
        return ServerSpec(
            name,
            self.model,
            transfer,
            arguments=self.arguments,
            environment={**place.environment, **(environment or {})},
            cpus=place.cpu,
            host=place.http_host,
            wrapper=place.wrapper,
        )


def length_arguments(longest: int, max_num_batched_tokens: int) -> list[str]:
    """vLLM's, for requests of at most so many tokens with their answers.

    With room for four such requests, one is within every limit that is a share of the cache
    (`unreserved_fraction` is the least), and the caches of all arms fit into memory.
    """
    blocks = max(_LEAST_BLOCKS, 4 * -(-longest // _BLOCK_TOKENS))
    return [
        f"--max-model-len={longest}",
        f"--max-num-batched-tokens={max_num_batched_tokens}",
        f"--num-gpu-blocks-override={blocks}",
    ]


def start_arms(servers: Servers, setup: Setup, names: Sequence[str]) -> list[Arm]:
    """Start what the arms need, one pair after the other; all of it is stopped on return."""
    arms: list[Arm] = []
    if "aggregated" in names:
        single = servers.start(setup.server("aggregated", setup.prefill))
        servers.wait_ready()
        arms.append(Arm("aggregated", single.url, [single]))
        arms[-1].pause()
    ours = [name for name in ("pull", "push") if name in names]
    if ours:
        arms += _start_ours(servers, setup, ours)
    for name in NIXL_ARMS:
        if name in names:
            arms.append(_start_nixl(servers, setup, name))
            arms[-1].pause()
    return arms


def _start_ours(servers: Servers, setup: Setup, flows: Sequence[str]) -> list[Arm]:
    port = free_port()
    connector = {"kv_connector": "LLMDataDistConnector", "kv_load_failure_policy": "fail"}
    common = {**setup.options, "trace_dir": str(setup.times / OUR_TIMES)}
    pair = []
    for name, role, place, own in (
        ("prefill", "kv_producer", setup.prefill, {"control_port": port}),
        ("decode", "kv_consumer", setup.decode, {}),
    ):
        extra = {**common, "host": place.transfer_host, **own}
        transfer = {**connector, "kv_role": role, "kv_connector_extra_config": extra}
        pair.append(servers.start(setup.server(name, place, transfer)))
    servers.wait_ready()
    arms = []
    for flow in flows:
        words = ("--flow", flow, "--prefill-control", f"{setup.prefill.transfer_host}:{port}")
        arms.append(_behind_proxy(servers, flow, pair, words))
    for arm in arms:
        arm.pause()
    return arms


def _start_nixl(servers: Servers, setup: Setup, name: str) -> Arm:
    """A connector of vLLM's as its documentation sets it up for KV caches in host memory."""
    extra = {**NIXL_EXTRA_CONFIG, "times_dir": str(setup.times / name)}
    common = {
        "kv_connector": NIXL_ARMS[name],
        "kv_connector_module_path": "timed_nixl",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": extra,
    }
    path = os.pathsep.join(filter(None, [str(BENCHMARKS), os.environ.get("PYTHONPATH")]))
    ports = [free_port(), free_port()]
    pair = []
    for side, role, place, port in (
        ("prefill", "kv_producer", setup.prefill, ports[0]),
        ("decode", "kv_consumer", setup.decode, ports[1]),
    ):
        environment = {
            "PYTHONPATH": path,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": place.transfer_host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
        own_name = f"{name}-{side}"
        transfer = {**common, "kv_role": role, "engine_id": own_name}
        pair.append(servers.start(setup.server(own_name, place, transfer, environment)))
    servers.wait_ready()
    settings = {"settings": ", ".join(f"{key}={value}" for key, value in NIXL_EXTRA_CONFIG.items())}
    if name == "nixl":
        return _behind_proxy(servers, name, pair, ("--flow", "pull"), settings)
    side_channel = f"{setup.prefill.transfer_host}:{ports[0]}"
    words = ("--engine-id", f"{name}-prefill", "--side-channel", side_channel)
    return _behind_proxy(servers, name, pair, words, settings, NixlPushProxySpec)


class NixlPushProxySpec(ProxySpec):
    """nixl_push_proxy.py in place of the example's."""

    def command(self, port: int) -> list[str]:
        words = [sys.executable, str(BENCHMARKS / "nixl_push_proxy.py"), "--port", str(port)]
        return [*words, "--prefill", self.prefill[0], "--decode", self.decode[0], *self.arguments]


def _behind_proxy(
    servers: Servers,
    name: str,
    pair: Sequence[Server],
    words: Sequence[str],
    settings: Mapping[str, str] | None = None,
    kind: type[ProxySpec] = ProxySpec,
) -> Arm:
    prefill, decode = pair
    spec = kind(f"proxy-{name}", [prefill.url], [decode.url], arguments=words)
    proxy = servers.start(spec)
    servers.wait_ready()
    return Arm(name, proxy.url, [*pair, proxy], settings or {})


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended since
        return 0
    return int(fields[11]) + int(fields[12])
