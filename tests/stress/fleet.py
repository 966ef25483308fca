"""One P, two D and a proxy per flow; single servers can be killed, stopped and restarted."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "disaggregated_prefill"))
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from flow import connector_config  # noqa: E402
from servers import (  # noqa: E402
    ProxySpec,
    Server,
    ServerError,
    Servers,
    ServerSpec,
    free_port,
    raise_on_terminate,
)
from tiny_model import make_tiny_model  # noqa: E402

__all__ = ["FLOWS", "Fleet", "Server", "ServerError", "Servers", "raise_on_terminate"]

MODEL = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct"
FLOWS = ("push", "pull")
PREFILL = "prefill"
DECODES = ("decode-1", "decode-2")
POLICIES = {"decode-1": "recompute", "decode-2": "fail"}
"""Of a failed load: the first D repairs it, the second reports it to the client."""

FEW_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
"""oneDNN keeps code for the last 1,024 shapes of batches, which makes a server without a connector
grow by 0.2 MiB per request for a long time. Bounded, so that a growth of ours shows."""


@dataclass(frozen=True)
class Times:
    """Deadlines of the connectors, in seconds."""

    first_contact: float = 5
    request: float = 20
    lease: float = 10


class Fleet:
    """All servers; ``report`` gets lines about what happens to them."""

    def __init__(self, servers: Servers, work: Path, times: Times, report: Callable[[str], None]):
        self._servers = servers
        self._report = report
        self.model = make_tiny_model(work / "tiny-llama", MODEL)
        self._control_port = free_port()
        common = {
            "first_contact_timeout_s": times.first_contact,
            "reserve_timeout_s": times.request,
            "request_timeout_s": times.request,
        }
        own = {"control_port": self._control_port, "lease_s": times.lease}
        specs = [self._spec(PREFILL, connector_config("kv_producer", **common, **own))]
        for name in DECODES:
            policy = {"kv_load_failure_policy": POLICIES[name]}
            specs.append(self._spec(name, connector_config("kv_consumer", **common, **policy)))
        self.by_name: dict[str, Server] = {}
        for spec in specs:
            self.by_name[spec.name] = servers.start(spec)
        servers.wait_ready()
        self.proxies = {flow: self._start_proxy(flow) for flow in FLOWS}
        servers.wait_ready()

    def _spec(self, name: str, transfer: dict[str, Any]) -> ServerSpec:
        arguments = ("--max-model-len", "2048", "--max-num-batched-tokens", "256")
        port = free_port()
        return ServerSpec(
            name,
            self.model,
            transfer,
            port=port,
            arguments=arguments,
            environment=FEW_SHAPES,
            dtype="float32",
        )

    def _start_proxy(self, flow: str) -> Server:
        words = ("--flow", flow, "--prefill-control", f"127.0.0.1:{self._control_port}")
        decodes = [self.by_name[name].url for name in DECODES]
        spec = ProxySpec(f"proxy-{flow}", [self.prefill.url], decodes, arguments=words)
        return self._servers.start(spec)

    @property
    def prefill(self) -> Server:
        return self.by_name[PREFILL]

    def stop_for(self, name: str, seconds: float) -> None:
        """Stop all processes of a server, and let them go on after a while."""
        self._report(f"{name}: stopped for {seconds:.0f} s")
        self.by_name[name].send(signal.SIGSTOP)
        time.sleep(seconds)
        self.by_name[name].send(signal.SIGCONT)

    def kill(self, name: str) -> None:
        self._report(f"{name}: killed")
        server = self.by_name[name]
        server.send(signal.SIGKILL)
        self._servers.stop_one(server)

    def restart(self, name: str) -> None:
        """Start a killed server again, at the same address, and wait until it is ready."""
        old = self.by_name[name]
        self.by_name[name] = self._servers.start(replace(old.spec, port=old.port))
        self._servers.wait_ready()
