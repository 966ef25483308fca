"""P's and D's processes of ``chaos_engine.py`` and the relays in front of P, from the parent.

Processes are forked from one that has imported everything, so that a restart takes milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from zmtp_relay import Relay

STRESS = Path(__file__).resolve().parent
PREFILL = "p"
DECODES = ("d0", "d1")
ANSWER_S = 60.0


def fork_server() -> Any:
    """The context whose processes begin with everything imported."""
    path = [str(STRESS), str(STRESS.parent), *filter(None, sys.path)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos_prefill", "chaos_decode"])
    return context


def serve(name: str, pipe: Connection, seed: int, option: int) -> None:
    """In the new process."""
    from chaos_decode import DecodeProcess
    from chaos_prefill import PrefillProcess

    kind: Any = PrefillProcess if name == PREFILL else DecodeProcess
    kind(pipe, seed, option).run()


class Process:
    """One process from its start to its end."""

    def __init__(self, context: Any, name: str, seed: int, option: int) -> None:
        self.name = name
        self.is_stopped = False
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = context.Process(
            target=serve, args=(name, theirs, seed, option), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self.pipe.poll(ANSWER_S), f"{name} does not start"
        _, self.scheduler_port, self.worker_port = self.pipe.recv()

    def order(self, *order: Any) -> None:
        """One that is dead does nothing."""
        with contextlib.suppress(OSError):
            self.pipe.send(order)

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        self.is_stopped = True

    def resume(self) -> None:
        if self.is_stopped:
            os.kill(self._process.pid, signal.SIGCONT)
        self.is_stopped = False

    def kill(self) -> None:
        self.is_stopped = False
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def close(self) -> int | None:
        """End it in order; its exit status."""
        self.resume()
        self.pipe.close()
        self._process.join(ANSWER_S)
        status: int | None = self._process.exitcode
        self._process.kill()
        return status


class ChaosFleet:
    """P, two D's, and the relays over which they talk; a server is missing while it is dead."""

    def __init__(self, seed: int, keeps_reservations: bool) -> None:
        self._context = fork_server()
        self._seed = seed
        self._keeps_reservations = keeps_reservations
        self.scheduler_relay, self.worker_relay = Relay(seed), Relay(seed + 1)
        self.by_name: dict[str, Process] = {}
        for name in (PREFILL, *DECODES):
            self.start(name)

    @property
    def relays(self) -> tuple[Relay, Relay]:
        return self.scheduler_relay, self.worker_relay

    def start(self, name: str) -> None:
        self._seed += 1
        is_prefill = name == PREFILL
        option = self.worker_relay.port if is_prefill else int(self._keeps_reservations)
        process = Process(self._context, name, self._seed, option)
        self.by_name[name] = process
        if is_prefill:
            self.scheduler_relay.target = process.scheduler_port
            self.worker_relay.target = process.worker_port

    def kill(self, name: str) -> None:
        self.by_name.pop(name).kill()
        if name == PREFILL:
            for relay in self.relays:
                relay.target = 0
            self.cut()

    def cut(self) -> None:
        for relay in self.relays:
            relay.cut()

    def close(self) -> dict[str, int | None]:
        """End all in order; exit statuses."""
        statuses = {name: process.close() for name, process in self.by_name.items()}
        for relay in self.relays:
            relay.close()
        return statuses
