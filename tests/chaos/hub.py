"""Virtual time: which simulated thread runs next, decided by a seed.

A ``Task`` is one thread of one simulated process, as a greenlet; all of them share one real thread.
A task runs until it sleeps, waits or comes to a point where the real scheduler might let another
one run; then the hub takes the next event by time. Events of the same time come in an order that
the seed draws, so that every interleaving of the points can come up and one seed always gives the
same.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from greenlet import GreenletExit, greenlet
from journal import Journal

MAX_POLLS_PER_S = 5_000
"""A thread that looks for messages more often than this does not sleep."""


class Surroundings(Protocol):
    """Globals of the real process that belong to one task while it runs."""

    def enter(self) -> None: ...
    def leave(self) -> None: ...


@dataclass(eq=False)
class Process:
    """One simulated operating system process."""

    name: str
    clock_offset_s: float = 0.0
    """Its monotonic clock's lead over the hub's: other machines have booted at other times."""
    is_alive: bool = True
    is_stopped: bool = False
    """As by SIGSTOP: what is due for its tasks is kept."""
    tasks: list[Task] = field(default_factory=list)
    kept: list[_Event] = field(default_factory=list)
    on_death: list[Callable[[], None]] = field(default_factory=list)
    """What the kernel does for a dead process: close its sockets, forget its memory."""


@dataclass(eq=False)
class Task:
    """One thread."""

    process: Process
    name: str
    greenlet: greenlet = field(init=False)
    surroundings: Surroundings | None = None
    turn: int = 0
    """Counts its waits: an event for an earlier one is void."""
    is_over: bool = False
    polls: tuple[int, int] = (0, 0)
    """The second of its last look for messages, and the number of looks in it."""
    thread: Any = None
    """The ``threading.Thread`` that it seems to be."""


class _Event(NamedTuple):
    """Ordered by time, then by lot; the number is unlike any other's."""

    due_s: float
    lot: float
    number: int
    run: Callable[[], None] | None
    task: Task | None
    turn: int
    value: bool


class Hub:
    """All processes and the time of one simulated world."""

    def __init__(self, seed: str, journal: Journal, switch_chance: float = 0.05) -> None:
        """``switch_chance``: how often a task is overtaken where it could be."""
        self.random = random.Random(f"hub {seed}")
        self.journal = journal
        self.now_s = 0.0
        self.current: Task | None = None
        self.num_switches = 0
        """How often some task has run."""
        self._switch_chance = switch_chance
        self.errors: list[str] = []
        """What no task may end by."""
        self._processes: list[Process] = []
        self._events: list[_Event] = []
        self._number = 0
        self._root = greenlet.getcurrent()

    # Processes and tasks

    def start(self, process: Process, run: Callable[[], None], name: str) -> Task:
        """A new thread of a process."""
        if process not in self._processes:
            self._processes.append(process)
        task = Task(process, name)
        task.greenlet = greenlet(partial(self._body, task, run), self._root)
        if process.is_alive:
            process.tasks.append(task)
            self._push(0.0, task=task)
        return task

    def _body(self, task: Task, run: Callable[[], None]) -> None:
        try:
            run()
        except GreenletExit:
            pass
        except BaseException:
            who = f"{task.process.name} {task.name}"
            self.errors.append(self.journal.exception(self.now_s, who))
        finally:
            task.is_over = True
            if task in task.process.tasks:
                task.process.tasks.remove(task)

    def kill(self, process: Process) -> None:
        """End a process at once, wherever its tasks are; from a callback, not from a task."""
        assert self.current is None
        process.is_alive = False
        for task in list(process.tasks):
            self._end(task)
        process.tasks.clear()
        process.kept.clear()
        for action in process.on_death:
            action()

    def _end(self, task: Task) -> None:
        """Unwind a task of a dead process, which can wait for nothing any more."""
        if task.greenlet:
            self._switch_to(task, lambda: task.greenlet.throw(GreenletExit))
        task.is_over = True

    def abandon(self) -> None:
        """The world is over: unwind whatever is left."""
        for process in self._processes:
            if process.is_alive:
                self.kill(process)
        self._events.clear()

    def stop(self, process: Process) -> None:
        process.is_stopped = True

    def go_on(self, process: Process) -> None:
        """What came for a stopped process comes now, in its order."""
        process.is_stopped = False
        kept, process.kept = process.kept, []
        for event in kept:
            self._push(0.0, task=event.task, turn=event.turn, value=event.value)

    # For tasks

    def sleep(self, seconds: float) -> None:
        """Let time pass for the current task."""
        self.wait(seconds)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for ``wake``; False when the time ran out."""
        task = self.current
        assert task is not None, "the hub itself cannot wait"
        if not task.process.is_alive:
            raise GreenletExit
        if timeout_s is not None:
            self._push(timeout_s, task=task, turn=task.turn)
        woken: bool = self._root.switch()
        return woken

    def wake(self, task: Task) -> None:
        """End a task's wait, if it is in one."""
        if not task.is_over:
            self._push(0.0, task=task, turn=task.turn, value=True)

    def point(self) -> None:
        """Another task may run here."""
        task = self.current
        if (
            task is not None
            and task.process.is_alive
            and self.random.random() < self._switch_chance
        ):
            self.sleep(self.random.random() * 0.0005)

    def note_poll(self) -> None:
        """The current task looks for messages, with or without waiting for them."""
        task = self.current
        assert task is not None
        second, number = task.polls
        number = number + 1 if second == int(self.now_s) else 1
        task.polls = int(self.now_s), number
        if number == MAX_POLLS_PER_S:
            self.errors.append(f"{task.process.name} {task.name} polls without a pause")
        self.point()

    def call_later(self, seconds: float, run: Callable[[], None]) -> None:
        """Run a callback, which must not wait."""
        self._push(seconds, run=run)

    # The loop

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until ``is_over``, asked between them, or there is none."""
        while self._events and not is_over():
            event = heapq.heappop(self._events)
            self.now_s = max(self.now_s, event.due_s)
            if event.run is not None:
                event.run()
            else:
                assert event.task is not None
                self._resume(event.task, event)

    def _resume(self, task: Task, event: _Event) -> None:
        if task.is_over or event.turn != task.turn:
            return
        if task.process.is_stopped:
            task.process.kept.append(event)
            return
        task.turn += 1
        value = (event.value,) if task.greenlet else ()
        self._switch_to(task, lambda: task.greenlet.switch(*value))

    def _switch_to(self, task: Task, switch: Callable[[], object]) -> None:
        self.num_switches += 1
        self.current = task
        if task.surroundings is not None:
            task.surroundings.enter()
        switch()
        if task.surroundings is not None:
            task.surroundings.leave()
        self.current = None

    def _push(
        self,
        seconds: float,
        run: Callable[[], None] | None = None,
        task: Task | None = None,
        turn: int | None = None,
        value: bool = False,
    ) -> None:
        self._number += 1
        if turn is None:
            turn = task.turn if task is not None else 0
        event = _Event(
            self.now_s + seconds, self.random.random(), self._number, run, task, turn, value
        )
        heapq.heappush(self._events, event)
