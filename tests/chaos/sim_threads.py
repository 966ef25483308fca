"""``threading``, ``time`` and ``secrets`` for code that runs in simulated processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from hub import Hub, Task


class SimLock:
    """``threading.Lock`` and, when ``reentrant``, ``threading.RLock``."""

    def __init__(self, hub: Hub, reentrant: bool = False) -> None:
        self._hub = hub
        self._reentrant = reentrant
        self._owner: Task | None = None
        self._depth = 0
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        hub = self._hub
        if self._reentrant and self._depth and self._owner is hub.current:
            self._depth += 1
            return True
        hub.point()
        while self._depth:
            if not blocking:
                return False
            assert hub.current is not None, "the hub would wait for a lock"
            self._waiting.append(hub.current)
            hub.wait(None)
        self._owner, self._depth = hub.current, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            waiting, self._waiting = self._waiting, []
            for task in waiting:
                self._hub.wake(task)

    def release_all(self) -> int:
        """Give it up however often it was taken; returns how often."""
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def take_again(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class SimCondition:
    """``threading.Condition``."""

    def __init__(self, hub: Hub, lock: SimLock | None = None) -> None:
        self._hub = hub
        self._lock = lock or SimLock(hub, reentrant=True)
        self._waiting: list[Task] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *args: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        task = self._hub.current
        assert task is not None
        self._waiting.append(task)
        depth = self._lock.release_all()
        try:
            woken = self._hub.wait(timeout)
        finally:
            if task in self._waiting:
                self._waiting.remove(task)
        self._lock.take_again(depth)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = None if timeout is None else self._hub.now_s + timeout
        while not (result := predicate()):
            left_s = None if end_s is None else end_s - self._hub.now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
        return result

    def notify(self, n: int = 1) -> None:
        for task in self._waiting[:n]:
            self._waiting.remove(task)
            self._hub.wake(task)

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class SimEvent:
    """``threading.Event``."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            self._hub.wake(task)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        end_s = None if timeout is None else self._hub.now_s + timeout
        while not self._is_set:
            left_s = None if end_s is None else end_s - self._hub.now_s
            if left_s is not None and left_s <= 0:
                break
            assert self._hub.current is not None
            self._waiting.append(self._hub.current)
            self._hub.wait(left_s)
        return self._is_set


class SimThread:
    """``threading.Thread``, in the process of the task that starts it."""

    def __init__(
        self,
        hub: Hub,
        target: Callable[..., object],
        name: str = "thread",
        args: Iterable[Any] = (),
        daemon: bool | None = None,
    ) -> None:
        self._hub = hub
        self._target = target
        self._args = tuple(args)
        self._ended = SimEvent(hub)
        self.name = name
        self.daemon = daemon

    def start(self) -> None:
        hub = self._hub
        assert hub.current is not None, f"{self.name}: a thread of no process"
        task = hub.start(hub.current.process, self._run, self.name)
        task.thread = self
        hub.point()

    def _run(self) -> None:
        try:
            self._target(*self._args)
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)


def make_threading(hub: Hub) -> SimpleNamespace:
    """What stands for the module ``threading``."""

    def current_thread() -> object:
        task = hub.current
        return None if task is None else task.thread or task

    return SimpleNamespace(
        Lock=lambda: SimLock(hub),
        RLock=lambda: SimLock(hub, reentrant=True),
        Condition=lambda lock=None: SimCondition(hub, lock),
        Event=lambda: SimEvent(hub),
        Thread=lambda **options: SimThread(hub, **options),
        current_thread=current_thread,
    )


def make_time(hub: Hub) -> SimpleNamespace:
    """What stands for the module ``time``: each process has a clock of its own."""

    def monotonic() -> float:
        task = hub.current
        return hub.now_s + (task.process.clock_offset_s if task is not None else 0.0)

    return SimpleNamespace(
        monotonic=monotonic, monotonic_ns=lambda: int(monotonic() * 1e9), sleep=hub.sleep
    )


def make_secrets(generator: random.Random) -> SimpleNamespace:
    """What stands for the module ``secrets``: the seed draws them."""
    return SimpleNamespace(
        token_hex=lambda length: generator.randbytes(length).hex(),
        randbits=generator.getrandbits,
    )
