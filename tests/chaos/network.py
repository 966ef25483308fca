"""The control network between simulated processes: connections, messages in flight, bad weather.

A connection keeps the order of its messages as TCP does, unless the weather is to reorder them:
the protocol promises to stand that as well, and repetitions and losses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
from hub import Hub, Process

from vllm_llmdd_connector.control.messages import decode
from vllm_llmdd_connector.errors import RemoteProtocolError

RECONNECT_S = 0.1
"""libzmq's default."""
_FIRST_PORT = 20000

Address = tuple[str, int]


@dataclass
class Weather:
    """What becomes of messages now; chances are per message."""

    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """The message does not wait for those before it."""
    delay: float = 0.0
    delay_s: float = 0.0
    """The most that a delayed message, and all that is behind it, takes longer."""


@dataclass(eq=False)
class Port:
    """A listening socket."""

    address: Address
    process: Process
    deliver: Callable[[list[bytes]], None]
    is_open: bool = True
    links: dict[bytes, Link] = field(default_factory=dict)


@dataclass(eq=False)
class Link:
    """A dialling socket and its connection, while it has one."""

    address: Address
    process: Process
    deliver: Callable[[bytes], None]
    happened: Callable[[int], None]
    is_open: bool = True
    port: Port | None = None
    identity: bytes = b""
    unsent: list[bytes] = field(default_factory=list)
    """Given to the socket while there is no connection."""
    last_due_s: dict[str, float] = field(default_factory=dict)
    """Per direction, when the last message arrives."""


class Network:
    """All ports and connections of a world."""

    def __init__(self, hub: Hub, latency_s: float = 0.0001) -> None:
        self._hub = hub
        self.latency_s = latency_s
        """Mean of a message's."""
        self._ports: dict[Address, Port] = {}
        self._links: list[Link] = []
        self._dark: set[Address] = set()
        """Of machines that do not even refuse a connection."""
        self._numbers = itertools.count(1)
        self._next_port = itertools.count(_FIRST_PORT)
        self.weather = Weather()
        self.messages: dict[str, int] = {}
        """Sent so far, by kind."""
        self.num_faults: dict[str, int] = {}

    # Sockets

    def listen(
        self, address: Address, process: Process, deliver: Callable[[list[bytes]], None]
    ) -> Port | None:
        """Bind; None when the address is taken."""
        if not address[1]:
            address = (address[0], next(self._next_port))
        if address in self._ports:
            return None
        port = self._ports[address] = Port(address, process, deliver)
        self._dark.discard(address)
        return port

    def close_port(self, port: Port) -> None:
        if port.is_open:
            port.is_open = False
            del self._ports[port.address]
            if port.address not in self._dark:
                for link in list(port.links.values()):
                    self.break_link(link)

    def lose_machine(self, process: Process) -> None:
        """The process is about to end without a word to its peers, as with its machine's power."""
        for port in self._ports.values():
            if port.process is process:
                self._dark.add(port.address)

    def dial(
        self,
        address: Address,
        process: Process,
        deliver: Callable[[bytes], None],
        happened: Callable[[int], None],
    ) -> Link:
        link = Link(address, process, deliver, happened)
        self._links.append(link)
        self._hub.call_later(self.latency_s, lambda: self._connect(link))
        return link

    def close_link(self, link: Link) -> None:
        if link.is_open:
            link.is_open = False
            self._links.remove(link)
            self._disconnect(link)

    @property
    def links(self) -> list[Link]:
        """Those that are connected now."""
        return [link for link in self._links if link.port is not None]

    @property
    def num_links(self) -> int:
        """Of dialling sockets that are not closed."""
        return len(self._links)

    def break_link(self, link: Link) -> None:
        """The connection is lost, with all that is in flight; the dialler tries again."""
        self._disconnect(link)
        if link.is_open:
            self._hub.call_later(self.latency_s, lambda: self._tell(link, zmq.EVENT_DISCONNECTED))
            self._hub.call_later(RECONNECT_S, lambda: self._connect(link))

    def _connect(self, link: Link) -> None:
        if not link.is_open or link.port is not None:
            return
        port = self._ports.get(link.address)
        if port is None:
            if link.address not in self._dark:
                self._tell(link, zmq.EVENT_CONNECT_RETRIED)
            self._hub.call_later(RECONNECT_S, lambda: self._connect(link))
            return
        link.port = port
        link.identity = next(self._numbers).to_bytes(5, "big")
        link.last_due_s.clear()
        port.links[link.identity] = link
        unsent, link.unsent = link.unsent, []
        for frame in unsent:
            self.send_to_server(link, frame)

    def _disconnect(self, link: Link) -> None:
        if link.port is not None:
            link.port.links.pop(link.identity, None)
            link.port = None

    def _tell(self, link: Link, event: int) -> None:
        if link.is_open:
            link.happened(event)

    # Messages

    def send_to_server(self, link: Link, frame: bytes) -> None:
        if not link.is_open:
            return
        if link.port is not None and not link.port.is_open and link.address in self._ports:
            # Another process at this address knows nothing of the connection.
            self.break_link(link)
        if link.port is None:
            link.unsent.append(frame)
            return
        port, identity = link.port, link.identity

        def arrive() -> None:
            if port.is_open and port.links.get(identity) is link:
                port.deliver([identity, frame])

        self._carry(link, "to server", frame, arrive)

    def send_to_client(self, port: Port, identity: bytes, frame: bytes) -> None:
        link = port.links.get(identity)
        if link is None:
            return

        def arrive() -> None:
            if link.identity == identity and link.port is port:
                link.deliver(frame)

        self._carry(link, "to client", frame, arrive)

    def _carry(self, link: Link, direction: str, frame: bytes, arrive: Callable[[], None]) -> None:
        assert link.port is not None
        draw, weather = self._hub.random.random, self.weather
        ends = (link.process.name, link.port.process.name)
        fate = ""
        if draw() < weather.drop:
            fate = "dropped"
        latency_s = self.latency_s * (0.5 + draw())
        if draw() < weather.delay:
            fate = fate or "delayed"
            latency_s += draw() * weather.delay_s
        due_s = self._hub.now_s + latency_s
        if draw() < weather.reorder:
            fate = fate or "reordered"
            due_s += draw() * max(weather.delay_s, 0.005)
        else:
            # Later by a little: events of one time come in any order.
            due_s = max(due_s, link.last_due_s.get(direction, 0.0) + 1e-7)
            link.last_due_s[direction] = due_s
        copies = 1
        if draw() < weather.duplicate:
            fate = fate or "duplicated"
            copies = 2
        if fate:
            self.num_faults[fate] = self.num_faults.get(fate, 0) + 1
        shown = _shown(frame)
        kind = shown.partition(" ")[0]
        self.messages[kind] = self.messages.get(kind, 0) + 1
        sender, receiver = ends if direction == "to server" else ends[::-1]
        self._hub.journal.note(self._hub.now_s, f"{sender} -> {receiver}: {shown} {fate}".rstrip())
        if fate != "dropped":
            for number in range(copies):
                self._hub.call_later(due_s - self._hub.now_s + number * draw() * 0.01, arrive)


def _shown(frame: bytes) -> str:
    """A message by its kind and what tells it from others of that kind."""
    try:
        message = decode(frame)
    except RemoteProtocolError:
        return "junk"
    names = ("claim_id", "reservation", "transfer_id", "production", "valid", "has_blocks")
    values = [f"{name}={getattr(message, name)}" for name in names if getattr(message, name, None)]
    return " ".join([type(message).__name__, *values])
