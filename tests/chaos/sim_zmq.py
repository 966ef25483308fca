"""``zmq`` and the connector's ``Wake`` for code that runs in simulated processes.

What the connector uses of pyzmq, with libzmq's behaviour where it matters to the connector: a
DEALER connects in the background and again after a loss, tells of both to its monitor, and keeps
what it is given meanwhile; a ROUTER names its peers and drops what is for none of them.
"""

from __future__ import annotations

import errno
import struct
from types import SimpleNamespace
from typing import Any, Protocol

import zmq
from hub import Hub, Task
from network import Link, Network, Port

LOOK_S = 0.00001


class _Pollable(Protocol):
    def is_ready(self) -> bool: ...

    waiting: list[Task]


class SimWake:
    """``control.channel.Wake``; stands for its own file descriptor."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._is_set = False
        self.waiting: list[Task] = []

    def fileno(self) -> SimWake:
        return self

    def is_ready(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _wake_all(self._hub, self.waiting)
        self._hub.point()

    def clear(self) -> None:
        self._is_set = False

    def close(self) -> None:
        """There is no descriptor to give back."""


class SimMonitor:
    """The socket that ``get_monitor_socket`` returns."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._events: list[int] = []
        self.waiting: list[Task] = []

    def is_ready(self) -> bool:
        return bool(self._events)

    def happened(self, event: int) -> None:
        self._events.append(event)
        _wake_all(self._hub, self.waiting)

    def poll(self, timeout: int) -> int:
        assert timeout == 0
        return len(self._events)

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [struct.pack("=hi", self._events.pop(0), 0), b""]

    def close(self, linger: int = 0) -> None:
        self._events.clear()


class SimSocket:
    """A ROUTER that listens or a DEALER that dials."""

    def __init__(self, context: SimContext) -> None:
        self._hub, self._network = context.hub, context.network
        self._context = context
        self._port: Port | None = None
        self._link: Link | None = None
        self._monitor: SimMonitor | None = None
        self._arrived: list[list[bytes]] = []
        self.waiting: list[Task] = []
        self.closed = False
        task = self._hub.current
        assert task is not None, "a socket of no process"
        self._process = task.process
        self._process.on_death.append(self._lose_process)

    @property
    def FD(self) -> SimSocket:
        """What a poller watches in its place."""
        return self

    def setsockopt(self, option: int, value: int) -> None:
        """Bounds, lingering and probes are not simulated."""

    def getsockopt_string(self, option: int) -> str:
        assert option == zmq.LAST_ENDPOINT
        assert self._port is not None
        return "tcp://{}:{}".format(*self._port.address)

    def bind(self, url: str) -> None:
        port = self._network.listen(_address_of(url), self._process, self._deliver)
        if port is None:
            raise zmq.ZMQError(errno.EADDRINUSE)
        self._port = port

    def connect(self, url: str) -> None:
        self._link = self._network.dial(
            _address_of(url), self._process, lambda frame: self._deliver([frame]), self._happened
        )

    def get_monitor_socket(self, events: int) -> SimMonitor:
        self._monitor = SimMonitor(self._hub)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def send(self, frame: bytes, flags: int) -> None:
        assert self._link is not None
        self._hub.point()
        self._network.send_to_server(self._link, frame)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert self._port is not None
        self._hub.point()
        self._network.send_to_client(self._port, frames[0], frames[1])

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._arrived:
            raise zmq.Again
        return self._arrived.pop(0)

    def is_ready(self) -> bool:
        return bool(self._arrived)

    def close(self, linger: int = 0) -> None:
        if self.closed:
            return
        self.closed = True
        self._context.num_open -= 1
        self._process.on_death.remove(self._lose_process)
        self._leave_network()

    def _lose_process(self) -> None:
        self.closed = True
        self._leave_network()

    def _leave_network(self) -> None:
        if self._port is not None:
            self._network.close_port(self._port)
        if self._link is not None:
            self._network.close_link(self._link)

    def _deliver(self, frames: list[bytes]) -> None:
        self._arrived.append(frames)
        _wake_all(self._hub, self.waiting)

    def _happened(self, event: int) -> None:
        if self._monitor is not None:
            self._monitor.happened(event)


class SimContext:
    """``zmq.Context``."""

    def __init__(self, hub: Hub, network: Network) -> None:
        self.hub, self.network = hub, network
        self.num_open = 0

    def set(self, option: int, value: int) -> None:
        """The number of sockets is not bounded here."""

    def socket(self, kind: int) -> SimSocket:
        self.num_open += 1
        return SimSocket(self)

    def term(self) -> None:
        """libzmq would wait here for ever."""
        task = self.hub.current
        if task is not None and task.process.is_alive:
            assert not self.num_open, f"term() with {self.num_open} open sockets"


class SimPoller:
    """``zmq.Poller``."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._watched: list[_Pollable] = []

    def register(self, pollable: _Pollable, flags: int) -> None:
        self._watched.append(pollable)

    def unregister(self, pollable: _Pollable) -> None:
        self._watched.remove(pollable)

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        self._hub.note_poll()
        if timeout == 0:
            # Even a look takes its time, so that others can run.
            self._hub.sleep(LOOK_S)
        elif not any(watched.is_ready() for watched in self._watched):
            task = self._hub.current
            assert task is not None
            for watched in self._watched:
                watched.waiting.append(task)
            try:
                self._hub.wait(None if timeout is None else timeout / 1000)
            finally:
                for watched in self._watched:
                    if task in watched.waiting:
                        watched.waiting.remove(task)
        return [(watched, zmq.POLLIN) for watched in self._watched if watched.is_ready()]


def make_zmq(hub: Hub, network: Network) -> SimpleNamespace:
    """What stands for the module ``zmq``."""
    constants = {name: getattr(zmq, name) for name in dir(zmq) if name.isupper()}
    return SimpleNamespace(
        **constants,
        Again=zmq.Again,
        ZMQError=zmq.ZMQError,
        Context=lambda: SimContext(hub, network),
        Poller=lambda: SimPoller(hub),
    )


def _address_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def _wake_all(hub: Hub, waiting: list[Task]) -> None:
    for task in waiting:
        hub.wake(task)
