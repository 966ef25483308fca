"""Makes a world's faults happen, at their times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from engines import Life
from plan import Fault

if TYPE_CHECKING:
    from world import World


class Disturber:
    """All faults of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self._generations: dict[int, int] = {}
        self._is_over = False
        self.num_faults: dict[str, int] = {}
        self.stopped_s = 0.0
        """How long processes have been stopped in total: requests may take as much longer."""

    def start(self) -> None:
        for fault in self._world.settings.faults:
            self._hub.call_later(fault.at_s, partial(self._do, fault))

    def end(self) -> None:
        """From here on all is well: the sky is clear and every process runs."""
        self._is_over = True
        self._world.network.weather = type(self._world.network.weather)()
        self._world.datadist.copy_weather = type(self._world.datadist.copy_weather)()
        for life in self._world.lives:
            if life.process.is_stopped:
                self._hub.go_on(life.process)

    def _do(self, fault: Fault) -> None:
        life = self._world.lives[fault.target]
        if self._is_over or not life.takes_requests:
            return
        action = _ACTIONS[fault.kind]
        if not action(self, fault, life):
            return
        self.num_faults[fault.kind] = self.num_faults.get(fault.kind, 0) + 1
        self._world.note(f"fault: {fault.kind} {life.name} {fault.duration_s:.3f} s")
        self._touch(None if fault.kind in _EVERYWHERE else life)

    def _touch(self, life: Life | None) -> None:
        """Note the requests that the fault meets."""
        for other in self._world.lives:
            for leg in other.legs.values():
                if leg.first_fault_s is None and life in (None, other, leg.peer):
                    leg.first_fault_s = self._hub.now_s

    # Processes

    def _kill(self, fault: Fault, life: Life) -> bool:
        self._touch(life)
        self._hub.kill(life.process)
        self._restart_later(fault)
        return True

    def _vanish(self, fault: Fault, life: Life) -> bool:
        self._world.network.lose_machine(life.process)
        return self._kill(fault, life)

    def _restart(self, fault: Fault, life: Life) -> bool:
        life.close()
        self._hub.call_later(0.5, lambda: self._await_end(fault, life))
        return True

    def _await_end(self, fault: Fault, life: Life) -> None:
        if life.process.is_alive and not life.closed.is_set():
            self._hub.call_later(0.5, lambda: self._await_end(fault, life))
        else:
            self._restart_later(fault)

    def _restart_later(self, fault: Fault) -> None:
        generation = self._generations[fault.target] = self._generations.get(fault.target, 0) + 1
        self._hub.call_later(
            fault.duration_s, lambda: self._world.start_engine(fault.target, generation)
        )

    def _stop(self, fault: Fault, life: Life) -> bool:
        if life.process.is_stopped:
            return False
        self._hub.stop(life.process)
        self.stopped_s += fault.duration_s
        self._hub.call_later(fault.duration_s, lambda: self._go_on(life))
        return True

    def _go_on(self, life: Life) -> None:
        if life.process.is_stopped:
            self._world.note(f"{life.name} goes on")
            self._hub.go_on(life.process)

    # The network

    def _cut(self, fault: Fault, life: Life) -> bool:
        links = [
            link
            for link in self._world.network.links
            if link.port is not None and life.process in (link.process, link.port.process)
        ]
        for link in links:
            if self._hub.random.random() < 0.5 + fault.amount / 2:
                self._world.network.break_link(link)
        return bool(links)

    def _weather(self, fault: Fault, **values: float) -> bool:
        weather = self._world.network.weather
        if any(getattr(weather, name) for name in values):
            return False
        self._exchange(weather, fault.duration_s, values)
        return True

    def _copies(self, fault: Fault, **values: float) -> bool:
        weather = self._world.datadist.copy_weather
        if any(getattr(weather, name) for name in values):
            return False
        self._exchange(weather, fault.duration_s, values)
        return True

    def _exchange(self, weather: object, duration_s: float, values: dict[str, float]) -> None:
        """Set some values for a while."""
        for name, value in values.items():
            setattr(weather, name, value)

        def clear() -> None:
            for name in values:
                setattr(weather, name, 0.0)

        self._hub.call_later(duration_s, clear)

    # vLLM

    def _preempt(self, fault: Fault, life: Life) -> bool:
        def preempt() -> None:
            engine = life.engine
            running = [] if engine is None else list(engine.scheduler.running)
            if engine is not None and running:
                engine.preempt(running[int(fault.amount * len(running))].request_id)

        life.post(preempt)
        return True

    def _fill_cache(self, fault: Fault, life: Life) -> bool:
        stack = ExitStack()

        def hold() -> None:
            assert life.engine is not None
            free = life.engine.free_blocks()
            stack.enter_context(life.engine.hold_blocks(int(free * fault.amount)))

        life.post(hold)
        self._hub.call_later(fault.duration_s, lambda: life.post(stack.close))
        return True

    def _reset_prefix_cache(self, fault: Fault, life: Life) -> bool:
        life.post(lambda: _reset(life, fault.amount < 0.5))
        return True


def _reset(life: Life, preempts: bool) -> None:
    assert life.engine is not None
    # While a lease or a load holds blocks vLLM refuses, and tells only the caller.
    with suppress(RuntimeError):
        life.engine.scheduler.reset_prefix_cache(
            reset_running_requests=preempts, reset_connector=True
        )


_EVERYWHERE = frozenset(
    {"delay", "drop", "duplicate", "reorder", "fail copies", "slow copies", "fail links"}
)

_ACTIONS: dict[str, Callable[[Disturber, Fault, Life], bool]] = {
    "kill": Disturber._kill,
    "vanish": Disturber._vanish,
    "restart": Disturber._restart,
    "stop": Disturber._stop,
    "cut": Disturber._cut,
    "delay": lambda d, f, life: d._weather(f, delay=f.amount, delay_s=f.amount * 2),
    "drop": lambda d, f, life: d._weather(f, drop=f.amount**2),
    "duplicate": lambda d, f, life: d._weather(f, duplicate=f.amount),
    "reorder": lambda d, f, life: d._weather(f, reorder=f.amount),
    "fail copies": lambda d, f, life: d._copies(f, fail=f.amount),
    "slow copies": lambda d, f, life: d._copies(f, slow=f.amount, slow_s=f.amount * 3),
    "fail links": lambda d, f, life: d._copies(f, fail_link=f.amount),
    "preempt": Disturber._preempt,
    "full cache": Disturber._fill_cache,
    "reset prefix cache": Disturber._reset_prefix_cache,
}
