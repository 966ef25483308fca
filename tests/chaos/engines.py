"""A vLLM engine as a simulated process: started, stepped, killed and started again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Engine, EngineSpec
from hub import Hub, Process
from install import VllmGlobals
from sim_threads import SimEvent

LAYER_S = 0.0004
STEP_S = 0.001
"""Of a step beside its layers."""
FIRST_IDLE_S, LAST_IDLE_S = 0.001, 0.05
"""Pauses of an engine that waits for others; they grow, so that a long wait is cheap."""


@dataclass(eq=False)
class Leg:
    """One request at one engine."""

    request_id: str
    role: str
    prompt: list[int]
    max_tokens: int
    submitted_s: float
    ended: SimEvent
    life: Life | None = None
    peer: Life | None = None
    """Of a decode leg, the P that has its prompt."""
    tokens: list[int] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    end: str = ""
    """vLLM's finish reason; ``lost`` with its engine, ``refused`` without one, ``aborted``."""
    ended_s: float = 0.0
    first_fault_s: float | None = None
    """When something first went wrong with it."""

    @property
    def is_over(self) -> bool:
        return bool(self.end)


class ChaosEngine(Engine):
    """The scripted engine, with its outputs handed on at once."""

    def __init__(self, spec: EngineSpec, directory: Path, take: Callable[[Any], None]) -> None:
        self._take_output = take
        super().__init__(spec, directory)

    def _take(self, output: Any) -> None:
        self._take_output(output)


class Life:
    """One start of an engine."""

    def __init__(self, hub: Hub, name: str, spec: EngineSpec, directory: Path) -> None:
        self.hub = hub
        self.name = name
        self.spec = spec
        self.process = Process(name, clock_offset_s=hub.random.uniform(0.0, 5000.0))
        self.engine: ChaosEngine | None = None
        self.legs: dict[str, Leg] = {}
        """Those without an end."""
        self.on_ended: Callable[[Leg], None] = lambda leg: None
        self.on_ready: Callable[[Life], None] = lambda life: None
        self.counts: dict[str, int] = {}
        """The connector's counters, with failures as ``failed at <stage>``."""
        self.is_closing = False
        self.closed = SimEvent(hub)
        self._directory = directory
        self._inputs: deque[Callable[[], None]] = deque()
        self._changed = SimEvent(hub)
        self._idle_s = FIRST_IDLE_S
        self.process.on_death.append(self._lose_legs)

    def start(self) -> None:
        task = self.hub.start(self.process, self._main, "engine core")
        task.surroundings = VllmGlobals()

    @property
    def takes_requests(self) -> bool:
        return self.engine is not None and self.process.is_alive and not self.is_closing

    @property
    def is_idle(self) -> bool:
        """Started, and without a request."""
        return self.takes_requests and not self._engine.has_work and not self._inputs

    @property
    def control_port(self) -> int:
        assert self.engine is not None
        return int(self.engine.connector._scheduler._server.port)

    # From other processes: what arrives at the engine's frontend.

    def submit(self, leg: Leg, params: dict[str, Any] | None) -> None:
        """Hand a request to the engine; without an engine it ends at once."""
        leg.life = self
        if not self.takes_requests:
            self.end(leg, "refused")
            return
        self.legs[leg.request_id] = leg
        self.post(lambda: self._add(leg, params))

    def abort(self, leg: Leg) -> None:
        """The client has gone away; vLLM says nothing more of the request."""
        if leg.is_over or self.engine is None:
            return
        self.engine.core.aborts_queue.put_nowait([leg.request_id])
        self.post(lambda: self._engine.abort(leg.request_id))
        self.end(leg, "aborted")

    def post(self, action: Callable[[], None]) -> None:
        """Run something between two steps."""
        self._inputs.append(action)
        self._changed.set()

    def close(self) -> None:
        """Shut the engine down in good order; its requests are lost."""
        self.is_closing = True
        self._changed.set()

    # In the engine's process

    @property
    def _engine(self) -> ChaosEngine:
        assert self.engine is not None
        return self.engine

    def _main(self) -> None:
        engine = ChaosEngine(self.spec, self._directory, self._take)
        engine.on_idle = self._pause
        for worker in engine.workers:
            worker.before_layer = lambda layer: self.hub.sleep(LAYER_S)
        self.engine = engine
        self.on_ready(self)
        while not self.is_closing:
            self._changed.clear()
            while self._inputs:
                self._inputs.popleft()()
            if engine.has_work:
                self._step(engine)
            else:
                self._changed.wait()
        self._lose_legs()
        self._take_stats(engine)
        engine.close()
        self.closed.set()

    def _step(self, engine: ChaosEngine) -> None:
        if engine.step():
            self._idle_s = FIRST_IDLE_S
        self._take_stats(engine)
        self.hub.sleep(STEP_S)

    def _pause(self) -> None:
        """Nothing could be computed; input ends the pause, vLLM would see it a little later."""
        self._changed.wait(self._idle_s)
        self._idle_s = min(2 * self._idle_s, LAST_IDLE_S)

    def _add(self, leg: Leg, params: dict[str, Any] | None) -> None:
        self._engine.add_request(
            leg.prompt,
            max_tokens=leg.max_tokens,
            kv_transfer_params=params,
            request_id=leg.request_id,
        )

    def _take(self, output: Any) -> None:
        leg = self.legs.get(output.request_id)
        if leg is None:
            # An aborted one may still have an output under way, as at a real frontend.
            return
        leg.tokens.extend(output.new_token_ids)
        if output.finish_reason is not None:
            leg.kv_transfer_params = output.kv_transfer_params
            self.end(leg, str(output.finish_reason))

    def end(self, leg: Leg, reason: str) -> None:
        """The client of a request has its last answer."""
        assert not leg.is_over, f"{leg.request_id}: {reason} after {leg.end}"
        self.legs.pop(leg.request_id, None)
        leg.end, leg.ended_s = reason, self.hub.now_s
        self.hub.journal.note(
            self.hub.now_s, f"{self.name}: {leg.request_id} ends: {reason} {leg.tokens}"
        )
        leg.ended.set()
        self.on_ended(leg)

    def _lose_legs(self) -> None:
        for leg in list(self.legs.values()):
            self.end(leg, "lost")

    def _take_stats(self, engine: ChaosEngine) -> None:
        rest = engine.connector.get_kv_connector_stats()
        snapshots: Sequence[Any] = engine.connector_stats + ([] if rest is None else [rest.data])
        for snapshot in snapshots:
            for name, amount in snapshot["counts"].items():
                self.counts[name] = self.counts.get(name, 0) + amount
            for stage, amount in snapshot["failures"].items():
                name = f"failed at {stage}"
                self.counts[name] = self.counts.get(name, 0) + amount
        engine.connector_stats.clear()
