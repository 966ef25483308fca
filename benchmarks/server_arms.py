"""The servers that bench_servers.py compares: who they are, how they are pinned, what they cost.

Every vLLM server has one processor to itself: P and the aggregated server the first, D the second.
Servers of arms that have no turn are stopped (SIGSTOP), since some spin when idle.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "disaggregated_prefill"
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

__all__ = ["ARMS", "Arm", "Servers", "Setup", "ask", "raise_on_terminate", "start_arms"]

ARMS = ("aggregated", "pull", "push", "nixl")
PREFILL_CPU, DECODE_CPU = "0", "1"
NIXL_EXTRA_CONFIG: Mapping[str, Any] = {"num_threads": 0}
"""The best of NixlConnector's settings that were tried, see docs/performance.md. With all of
them its progress thread spins; no setting of the connector stops that thread."""
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
        return [Arm(server.spec.name, server.url, [server]) for server in self._vllm()]

    def cpu_s(self) -> float:
        """Processor seconds that its vLLM servers have used so far."""
        pids = [pid for server in self._vllm() for pid in server.pids()]
        return sum(_ticks(pid) for pid in pids) / _TICKS_PER_S

    def _vllm(self) -> list[Server]:
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
class Setup:
    """What all servers have in common."""

    model: Path
    arguments: Sequence[str]
    traces: Path

    def server(self, name: str, cpu: str, transfer: dict[str, Any] | None = None) -> ServerSpec:
        return ServerSpec(name, self.model, transfer, arguments=self.arguments, cpus=cpu)


def start_arms(servers: Servers, setup: Setup, names: Sequence[str]) -> list[Arm]:
    """Start what the arms need, one pair after the other; all of it is stopped on return."""
    arms: list[Arm] = []
    if "aggregated" in names:
        single = servers.start(setup.server("aggregated", PREFILL_CPU))
        servers.wait_ready()
        arms.append(Arm("aggregated", single.url, [single]))
        arms[-1].pause()
    ours = [name for name in ("pull", "push") if name in names]
    if ours:
        arms += _start_ours(servers, setup, ours)
    if "nixl" in names:
        arms.append(_start_nixl(servers, setup))
        arms[-1].pause()
    return arms


def _start_ours(servers: Servers, setup: Setup, flows: Sequence[str]) -> list[Arm]:
    port = free_port()
    extra = {"trace_dir": str(setup.traces)}
    connector = {"kv_connector": "LLMDataDistConnector", "kv_load_failure_policy": "fail"}
    producer = {"kv_role": "kv_producer"}
    producer_extra = {"kv_connector_extra_config": {**extra, "control_port": port}}
    consumer = {"kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    pair = [
        servers.start(
            setup.server("prefill", PREFILL_CPU, {**connector, **producer, **producer_extra})
        ),
        servers.start(setup.server("decode", DECODE_CPU, {**connector, **consumer})),
    ]
    servers.wait_ready()
    arms = []
    for flow in flows:
        words = ("--flow", flow, "--prefill-control", f"127.0.0.1:{port}")
        arms.append(_behind_proxy(servers, flow, pair, words))
    for arm in arms:
        arm.pause()
    return arms


def _start_nixl(servers: Servers, setup: Setup) -> Arm:
    """vLLM's NixlConnector as its documentation sets it up for KV caches in host memory."""
    pair = []
    common = {"kv_buffer_device": "cpu", "kv_connector_extra_config": dict(NIXL_EXTRA_CONFIG)}
    for name, role, cpu in (
        ("nixl-prefill", "kv_producer", PREFILL_CPU),
        ("nixl-decode", "kv_consumer", DECODE_CPU),
    ):
        transfer = {"kv_connector": "NixlConnector", "kv_role": role, **common}
        side_channel = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        }
        spec = setup.server(name, cpu, transfer)
        pair.append(servers.start(replace(spec, environment=side_channel)))
    servers.wait_ready()
    arm = _behind_proxy(servers, "nixl", pair, ("--flow", "pull"))
    words = ", ".join(f"{name}={value}" for name, value in NIXL_EXTRA_CONFIG.items())
    return replace(arm, settings={"settings": words})


def _behind_proxy(servers: Servers, name: str, pair: Sequence[Server], words: Sequence[str]) -> Arm:
    prefill, decode = pair
    spec = ProxySpec(f"proxy-{name}", [prefill.url], [decode.url], arguments=words)
    proxy = servers.start(spec)
    servers.wait_ready()
    return Arm(name, proxy.url, [*pair, proxy])


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended since
        return 0
    return int(fields[11]) + int(fields[12])
