"""The two ends that a ``PeerThread`` talks to: its engine, and P's control channel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import zmq

from fakes.clock import PATIENCE_S
from vllm_llmdd_connector.control.messages import (
    Release,
    ReleaseAck,
    Unknown,
    WorkerEndpoint,
    decode,
    encode,
)
from vllm_llmdd_connector.layout.kv_layout import CachePlan


class FakePullEngine:
    """Records calls; the lists of errors are raised one by one before calls succeed."""

    cluster_id = 0xD
    has_reservations = True

    def __init__(self) -> None:
        self.open_tokens: list[int] = []
        self.calls: list[str] = []
        self.link_errors: list[Exception] = []
        self.pull_errors: list[Exception] = []
        self.pull_gate: threading.Event | None = None
        self.pull_started = threading.Event()
        self.on_pull: Callable[[], None] = lambda: None
        self.on_unlink: Callable[[], None] = lambda: None

    def link(self, endpoint: WorkerEndpoint) -> None:
        self.calls.append("link")
        if self.link_errors:
            raise self.link_errors.pop(0)

    def unlink(self, endpoint: WorkerEndpoint) -> None:
        self.calls.append("unlink")
        self.on_unlink()

    def pull(
        self, peer_cluster_id: int, plan: CachePlan, src_blocks: list[int], dst_blocks: list[int]
    ) -> None:
        self.calls.append(f"pull {plan.model_id} {src_blocks}->{dst_blocks}")
        self.pull_started.set()
        if self.pull_gate is not None:
            self.pull_gate.wait(PATIENCE_S)
        self.on_pull()
        if self.pull_errors:
            raise self.pull_errors.pop(0)

    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int:
        self.calls.append(f"open {plan.model_id} {blocks}")
        self.open_tokens.append(plan.model_id + 1)
        return plan.model_id + 1

    def close_reservation(self, token: int) -> None:
        self.calls.append(f"close {token}")
        self.open_tokens.remove(token)

    def names(self) -> list[str]:
        """The calls without their arguments."""
        return [call.split()[0] for call in self.calls]


class ReleasePeer:
    """P's scheduler: a real ROUTER that answers only when the test tells it to."""

    def __init__(self, cluster_id: int = 0xA) -> None:
        self.cluster_id = cluster_id
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.worker_port = self.port
        """Of the rank that takes reservations, if the test has one."""
        self._senders: dict[int, bytes] = {}

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(
            cluster_id=self.cluster_id,
            host="127.0.0.1",
            engine_port=1,
            control_port=self.worker_port,
        )

    @property
    def control_address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def next_release(self) -> Release:
        """Wait for the next Release."""
        assert self._socket.poll(int(PATIENCE_S * 1000)), "no Release arrived"
        sender, frame = self._socket.recv_multipart()
        message = decode(frame)
        assert isinstance(message, Release)
        self._senders[message.claim_id] = sender
        return message

    def has_message(self) -> bool:
        """Whether something waits to be read."""
        return bool(self._socket.poll(0))

    def releases_by_claim(self, claim_ids: Iterable[int]) -> dict[int, Release]:
        """Wait until every one of these claims has been released at least once."""
        wanted, seen = set(claim_ids), dict[int, Release]()
        while not wanted <= seen.keys():
            release = self.next_release()
            seen[release.claim_id] = release
        return seen

    def ack(self, release: Release, valid: bool = True) -> None:
        answer = ReleaseAck(claim_id=release.claim_id, production=release.production, valid=valid)
        self.send(release.claim_id, encode(answer))

    def disown(self, release: Release) -> None:
        """Answer as a P that was restarted since it granted the claim."""
        self.send(release.claim_id, encode(Unknown(session=release.session)))

    def send(self, claim_id: int, frame: bytes) -> None:
        """Any bytes to whoever released this claim."""
        self._socket.send_multipart([self._senders[claim_id], frame])

    def close(self) -> None:
        """Also what D sees when P's process dies; idempotent."""
        self._socket.close()
        self._context.term()
