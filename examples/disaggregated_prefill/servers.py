"""Start and stop vLLM servers and the proxy on this machine, for the demo, tests and benchmarks.

    with Servers(log_dir) as servers:
        prefill = servers.start(ServerSpec("prefill", model, kv_transfer_config={...}))
        decode = servers.start(ServerSpec("decode", model, kv_transfer_config={...}))
        servers.wait_ready()
        proxy = servers.start(ProxySpec("proxy", [prefill.url], [decode.url]))
        servers.wait_ready()
        ...

One vLLM server is several processes (API server, EngineCore, one worker per rank). Each server is
the leader of a session of its own, so that all of them can be found and ended by one process group,
and so that a Ctrl-C in the terminal reaches only this process, which then stops them in order.
Leaving the `with` block stops everything, whatever the reason. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # vLLM otherwise pins each server's threads to the same first cores of the machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # The model lies on disk: no server asks a hub or reports its use.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}

_TAIL_LINES = 40
_POLL_S = 0.25
_REPORT_S = 10.0

Report = Callable[[str], None]


class ServerError(Exception):
    """A server did not start, or ended by itself; the text carries the end of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """A `vllm serve`. `name` is also the log's file name; port 0 takes a free one."""

    name: str
    model: Path
    kv_transfer_config: Mapping[str, Any] | None = None
    port: int = 0
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "bfloat16"
    cpus: str = ""
    """The processors its threads stay on, as `taskset -c` takes them; empty: any."""
    host: str = "127.0.0.1"
    """Where it listens for HTTP."""
    wrapper: Sequence[str] = ()
    """A command that runs the rest of its arguments in its place, in the same process."""

    def command(self, port: int) -> list[str]:
        vllm = str(Path(sys.executable).with_name("vllm"))
        words = [vllm, "serve", str(self.model), "--host", self.host, "--port", str(port)]
        words += ["--dtype", self.dtype, "--enforce-eager"]
        if self.kv_transfer_config is not None:
            words += ["--kv-transfer-config", json.dumps(dict(self.kv_transfer_config))]
        pinned = ["taskset", "-c", self.cpus] if self.cpus else []
        return [*self.wrapper, *pinned, *words, *self.arguments]


@dataclass(frozen=True)
class ProxySpec:
    """The example proxy in front of servers that run already."""

    name: str
    prefill: Sequence[str]
    decode: Sequence[str]
    port: int = 0
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    host: ClassVar[str] = "127.0.0.1"

    def command(self, port: int) -> list[str]:
        words = [sys.executable, str(Path(__file__).with_name("proxy.py")), "--port", str(port)]
        words += [word for url in self.prefill for word in ("--prefill", url)]
        words += [word for url in self.decode for word in ("--decode", url)]
        return [*words, *self.arguments]


Spec = ServerSpec | ProxySpec


class Server:
    """One running server."""

    def __init__(self, spec: Spec, log_dir: Path) -> None:
        self.spec = spec
        self.port = spec.port or free_port()
        self.url = f"http://{spec.host}:{self.port}"
        self.log = log_dir / f"{spec.name}.log"
        self.ready = False
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                spec.command(self.port),
                env={**os.environ, **CPU_ENVIRONMENT, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Whether /health answers; raises ServerError when the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ServerError(f"server {self.spec.name} ended with status {code}. {self.tail()}")
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def tail(self, lines: int = _TAIL_LINES) -> str:
        text = self.log.read_text(errors="replace").splitlines()
        return f"The end of {self.log}:\n" + "\n".join(text[-lines:])

    def pids(self) -> list[int]:
        """The processes of this server that still run, its leader first."""
        return sorted(group_members(self.process.pid))

    def send(self, number: signal.Signals) -> None:
        """Signal every process of the server (tests stop and kill servers in this way)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Servers:
    """The servers of one run. Not thread-safe; use it from the main thread."""

    def __init__(self, log_dir: Path, report: Report = lambda line: None) -> None:
        self._log_dir = log_dir
        self._report = report
        self.running: list[Server] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self, spec: Spec) -> Server:
        """Start a server and return at once, so that several load side by side."""
        server = Server(spec, self._log_dir)
        self.running.append(server)
        self._report(f"{spec.name}: starting at {server.url}, log in {server.log}")
        return server

    def wait_ready(self, timeout_s: float = 240.0) -> None:
        """Wait for all servers; raise ServerError when one ends or the time is over."""
        start = time.monotonic()
        next_report = _REPORT_S
        waiting = [server for server in self.running if not server.ready]
        while waiting := [server for server in waiting if not self._note_ready(server, start)]:
            passed = time.monotonic() - start
            names = ", ".join(server.spec.name for server in waiting)
            if passed > timeout_s:
                raise ServerError(
                    f"not ready after {timeout_s:.0f} s: {names}. {waiting[0].tail()}"
                )
            if passed > next_report:
                self._report(f"{names}: loading, {passed:.0f} s")
                next_report += _REPORT_S
            time.sleep(_POLL_S)

    def _note_ready(self, server: Server, start: float) -> bool:
        server.ready = server.is_ready()
        if server.ready:
            self._report(f"{server.spec.name}: ready after {time.monotonic() - start:.0f} s")
        return server.ready

    def stop(self, grace_s: float = 10.0) -> None:
        """Stop every server and wait until none of its processes is left."""
        servers, self.running = self.running, []
        if servers:
            self._report("stopping " + ", ".join(server.spec.name for server in servers))
        with _uninterrupted():
            stop_groups([server.process for server in servers], grace_s)

    def stop_one(self, server: Server, grace_s: float = 10.0) -> None:
        self.running.remove(server)
        with _uninterrupted():
            stop_groups([server.process], grace_s)


def stop_groups(leaders: Sequence[subprocess.Popen[bytes]], grace_s: float) -> None:
    """End process groups: SIGTERM to each leader, SIGKILL to whatever is left after `grace_s`.

    The leader shuts its engine down itself; signalling engine and workers too would make them fail
    in the middle of that. SIGCONT first, because a stopped process would not see the SIGTERM.
    """
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGCONT)
        leader.terminate()
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(group_members(x.pid) for x in leaders):
        for leader in leaders:
            leader.poll()
        time.sleep(0.05)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()


def group_members(group: int) -> list[int]:
    """Return the processes of a process group that still run.

    Read from /proc, because a zombie whose parent never collects it keeps `killpg(group, 0)` happy
    for ever.
    """
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # The name in parentheses may hold spaces; state, parent and group follow it.
            state, _, pgrp = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state not in "ZX":
                members.append(int(entry.name))
    return members


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep a second Ctrl-C from leaving servers behind (signals belong to the main thread)."""
    try:
        old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)


def free_port() -> int:
    """Return a port that nothing listens on.

    Taken from below the range of outgoing connections: a port from inside it could be given to one
    between this check and the server's own bind.
    """
    for _ in range(200):
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("found no free port between 20000 and 32000")


def raise_on_terminate() -> None:
    """Turn SIGTERM and SIGHUP into SystemExit, so that `with Servers(...)` stops its servers."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
