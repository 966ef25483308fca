"""What P's and D's processes of ``chaos_engine.py`` share: the connector's two sides, and a loop.

A process runs the scheduler and worker side with all their threads and sockets, and of vLLM only
steps, requests and blocks. Its parent orders over a pipe; what happens goes back over the same one.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fakes.builders import make_model_facts
from fakes.rank import NO_LAYERS, FullAttentionSpec
from kv_memory import LAYERS, KVMemory

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.datadist import _engine
from vllm_llmdd_connector.scheduler import scheduler
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector
from vllm_llmdd_connector.worker import senders
from vllm_llmdd_connector.worker.worker import WorkerConnector

NUM_BLOCKS = 640
MAX_RUNNING = 8
OPTIONS: dict[str, Any] = {
    "first_contact_timeout_s": 1.0,
    "reserve_timeout_s": 2.5,
    "request_timeout_s": 2.5,
    "link_timeout_ms": 400,
    "sync_kv_timeout_ms": 600,
    "release_timeout_s": 0.8,
    "lease_s": 1.5,
    "max_lease_s": 8.0,
    "max_leased_fraction": 0.9,
}
"""Time limits are short, so that a run meets each often."""
SENDER_IDLE_S = 1.0
WARM_REQUESTS = 50


@dataclass(frozen=True)
class Leg:
    """One of a transfer's two requests, as its server gets it."""

    number: int
    num_tokens: int
    params: dict[str, Any] = field(hash=False)
    num_local_blocks: int = 0
    """D: of the prompt's first blocks, those that it has in its prefix cache."""
    is_slow: bool = False
    """P: it goes on with the request after the prompt."""

    @property
    def prompt(self) -> list[int]:
        return [self.number, *range(1, self.num_tokens)]


@dataclass(frozen=True)
class State:
    """A process's account of itself."""

    held: dict[str, int]
    """What has to be 0 when all requests have ended."""
    links: dict[str, int]
    """What has to be 0 when every connection was cut."""
    resources: dict[str, int]
    grown_kib: int
    """Resident memory more than when the process had got warm; 0 before."""


class Alarm(logging.Handler):
    """Collects what no thread of the connector should ever log or raise: internal errors."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []
        logging.getLogger().addHandler(self)
        threading.excepthook = lambda args: self.errors.append(repr(args.exc_value))

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.errors.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class EngineProcess:
    """One server without vLLM. ``step`` and the requests are the subclass's."""

    role = ""

    def __init__(self, pipe: Connection, seed: int) -> None:
        torch.set_num_threads(1)
        senders.IDLE_S = SENDER_IDLE_S
        self._alarm = Alarm()
        self.pipe = pipe
        self.dice = random.Random(seed)
        self.memory = KVMemory(NUM_BLOCKS)
        self.num_requests = 0
        self._warm_kib = 0
        transfer = SimpleNamespace(
            engine_id=f"{self.role} {seed}",
            kv_role=self.role,
            is_kv_producer=self.role == "kv_producer",
            is_kv_consumer=self.role == "kv_consumer",
        )
        parallel = SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=0)
        vllm: Any = SimpleNamespace(
            kv_transfer_config=transfer,
            compilation_config=NO_LAYERS,
            parallel_config=parallel,
            speculative_config=None,
            shutdown_timeout=0,
        )
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(), layer_names=list(LAYERS))
        cache: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=NUM_BLOCKS)
        scheduler.model_facts = lambda vllm_config: make_model_facts()
        config = ConnectorConfig(**OPTIONS)
        self.worker = WorkerConnector(vllm, cache, config, 0)
        self.worker.register_kv_caches(self.memory.tensors)
        self.scheduler = SchedulerConnector(vllm, cache, config)

    # The subclass's

    @property
    def has_work(self) -> bool:
        """Whether vLLM would step."""
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError

    def add(self, leg: Leg) -> None:
        raise NotImplementedError

    def abort(self, number: int) -> None:
        raise NotImplementedError

    def held(self) -> dict[str, int]:
        """As in ``State``."""
        raise NotImplementedError

    # Orders

    def slow_down(self, bytes_per_second: int) -> None:
        _engine.testing.set_copy_rate(bytes_per_second)

    def look(self) -> None:
        """One more step, as any later request would make, then an account."""
        self.step()
        while self._alarm.errors:
            self.tell("problem", self._alarm.errors.pop())
        self.tell("state", State(self.held(), self.links(), self.resources(), self.grown_kib()))

    def tell(self, *event: Any) -> None:
        self.pipe.send(event)

    def links(self) -> dict[str, int]:
        """As in ``State``."""
        return {}

    def resources(self) -> dict[str, int]:
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
        }

    def grown_kib(self) -> int:
        """Resident memory since the process had got warm."""
        return resident_kib() - self._warm_kib if self._warm_kib else 0

    def run(self) -> None:
        """Obey and step until the parent closes its end."""
        while True:
            try:
                while self.pipe.poll(0 if self.has_work else None):
                    name, *arguments = self.pipe.recv()
                    getattr(self, name)(*arguments)
            except EOFError:
                break
            if self.has_work:
                self.step()
        self.scheduler.shutdown()
        self.worker.shutdown()

    def count_request(self) -> None:
        self.num_requests += 1
        if self.num_requests == WARM_REQUESTS:
            self._warm_kib = resident_kib()


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1])
