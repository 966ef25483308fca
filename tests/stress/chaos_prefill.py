"""P of ``chaos_engine.py``: computes prompts in random chunks, preempts, and uses blocks again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
from engine_process import MAX_RUNNING, NUM_BLOCKS, EngineProcess, Leg
from fakes.prefiller import make_output
from fakes.requests import make_request
from kv_memory import LAYERS, Pool, num_blocks_of

CHUNKS = (7, 48, 100, 256, 512)
MAX_LAYER_S = 0.001
IDLE_STEP_S = 0.001
NOBODYS = -1
"""What stands in blocks that P has given back."""
PREEMPTS = 0.03
"""Share of steps that preempt a request."""


@dataclass
class Running:
    leg: Leg
    request: Any
    num_more_steps: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    is_known: bool = False
    """It has been scheduled before."""


@dataclass
class Chunk:
    """What a step computes of one request."""

    running: Running
    new_blocks: list[int]
    first: int
    num_tokens: int


class PrefillProcess(EngineProcess):
    role = "kv_producer"

    def __init__(self, pipe: Connection, seed: int, worker_relay_port: int) -> None:
        super().__init__(pipe, seed)
        self._freed: list[int] = []
        """Since the last step: vLLM may overwrite them in the next one."""
        self._pool = Pool(NUM_BLOCKS, lambda block: self._freed.append(block))
        self._waiting: list[Running] = []
        self._running: list[Running] = []
        pool: Any = self._pool
        self.scheduler.bind_block_pool(pool)
        handshake = self.worker.handshake
        assert handshake is not None
        assert handshake.endpoint is not None
        own_port = handshake.endpoint.control_port
        handshake.endpoint = msgspec.structs.replace(
            handshake.endpoint, control_port=worker_relay_port
        )
        self.scheduler.set_handshake({0: handshake})
        self.tell("ports", self.scheduler._server.port, own_port)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, leg: Leg) -> None:
        self.count_request()
        request = make_request(f"p{leg.number}", leg.prompt, leg.params)
        self.scheduler.on_new_request(request)
        self._waiting.append(Running(leg, request, self.dice.randint(1, 6) if leg.is_slow else 0))

    def abort(self, number: int) -> None:
        for running in [*self._waiting, *self._running]:
            if running.leg.number == number:
                self._finish(running, "FINISHED_ABORTED")

    def step(self) -> None:
        preempted = self._preempt()
        chunks = [] if preempted else self._schedule()
        message = self.scheduler.build_connector_meta(_output(chunks, preempted))
        self.worker.apply_voids(message)
        self.worker.bind(message)
        self._compute(chunks)
        self.worker.forward_ended()
        for chunk in chunks:
            self._after(chunk)
        if not chunks:
            time.sleep(IDLE_STEP_S)

    def _compute(self, chunks: list[Chunk]) -> None:
        freed, self._freed = self._freed, []
        for layer in LAYERS:
            for block in freed:
                self.memory.fill(layer, block, NOBODYS)
            for chunk in chunks:
                leg, blocks = chunk.running.leg, chunk.running.blocks
                end = min(chunk.first + chunk.num_tokens, leg.num_tokens)
                if chunk.first < end:
                    self.memory.write(leg.number, layer, blocks, chunk.first, end)
            if chunks:
                time.sleep(self.dice.uniform(0, MAX_LAYER_S))
                self.worker.layer_computed(layer)

    def _preempt(self) -> set[str]:
        if not self._running or self.dice.random() >= PREEMPTS:
            return set()
        victim = self.dice.choice(self._running)
        self._running.remove(victim)
        self._waiting.insert(0, victim)
        self._pool.give_back(victim.blocks)
        victim.blocks, victim.num_computed = [], 0
        victim.request.num_preemptions += 1
        self.tell("preempted", victim.leg.number)
        return {victim.request.request_id}

    def _schedule(self) -> list[Chunk]:
        budget = self.dice.choice(CHUNKS)
        chunks = []
        for running in [*self._running, *self._waiting]:
            is_new = running not in self._running
            if not budget or (is_new and len(self._running) >= MAX_RUNNING):
                break
            if is_new and self.scheduler.get_num_new_matched_tokens(running.request, 0)[0] is None:
                continue
            left = max(running.leg.num_tokens - running.num_computed, 1)
            count = min(budget, left)
            needed = num_blocks_of(running.num_computed + count) - len(running.blocks)
            if needed > len(self._pool.free):
                continue
            new_blocks = self._pool.take(max(needed, 0), self.dice.choice)
            running.blocks += new_blocks
            if is_new:
                self._waiting.remove(running)
                self._running.append(running)
            chunks.append(Chunk(running, new_blocks, running.num_computed, count))
            budget -= count
        return chunks

    def _after(self, chunk: Chunk) -> None:
        running = chunk.running
        running.is_known = True
        running.num_computed += chunk.num_tokens
        if running.num_computed < running.leg.num_tokens + running.num_more_steps:
            return
        params = self._finish(running, "FINISHED_LENGTH_CAPPED")
        self.tell("prefilled", running.leg.number, params)

    def _finish(self, running: Running, status: str) -> dict[str, Any] | None:
        running.request.status = SimpleNamespace(name=status)
        _, params = self.scheduler.request_finished(running.request, (running.blocks,))
        table = self._waiting if running in self._waiting else self._running
        table.remove(running)
        self._pool.give_back(reversed(running.blocks))
        if status == "FINISHED_ABORTED":
            self.tell("prefilled", running.leg.number, None)
        return params

    def held(self) -> dict[str, int]:
        producer, pusher = self.scheduler._producer, self.worker._pusher
        assert producer is not None
        assert pusher is not None
        return {
            "requests": len(self._waiting) + len(self._running),
            "leases": producer.num_leases,
            "handovers": len(producer.handovers),
            "blocks": NUM_BLOCKS - 1 - len(self._pool.free),
            "pushes": pusher.num_under_way,
            "prefills of the worker": pusher._plan.num_prefills,
        }


def _output(chunks: list[Chunk], preempted: set[str]) -> Any:
    new: dict[str, tuple[list[list[int]], int]] = {}
    cached: dict[str, tuple[list[list[int]] | None, int]] = {}
    for chunk in chunks:
        request_id = chunk.running.request.request_id
        if chunk.running.is_known:
            blocks = [chunk.new_blocks] if chunk.new_blocks else None
            cached[request_id] = (blocks, chunk.first)
        else:
            new[request_id] = ([chunk.new_blocks], chunk.first)
    scheduled = {chunk.running.request.request_id: chunk.num_tokens for chunk in chunks}
    return make_output(new, cached, scheduled, preempted)
