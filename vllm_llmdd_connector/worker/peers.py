"""D's worker: all the peers that one rank has to do with.

A peer's thread, connections and link are made for its first job. They end with the peer, when
nothing has come for it for long, or when there are too many: then those of the peer that was used
the longest ago. The next job for it makes them anew.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.metadata import Job
from vllm_llmdd_connector.worker.backend import Fence

MAX_PEERS = 480
"""An engine has 512 links at most; the rest are of peers that are about to end."""


class Peer(Protocol):
    """What ``Peers`` needs of a peer's thread; ``PeerThread`` has it."""

    endpoint: WorkerEndpoint

    @property
    def used_s(self) -> float: ...
    def start(self) -> None: ...
    def submit(self, job: Job, fence: Fence | None = None) -> bool: ...
    def give_up(self, request_id: str, reason: str) -> None: ...
    def retire(self) -> bool: ...
    def close(self) -> None: ...


MakePeer = Callable[[WorkerEndpoint, tuple[str, int], Callable[[Peer], None]], Peer]


class Peers:
    """By cluster id. Called by the worker's main thread, and by peers' threads at their end."""

    def __init__(self, make: MakePeer) -> None:
        """``make`` is given a rank of P, the address of P's scheduler, and what to call at the
        peer's end."""
        self._make = make
        self._lock = threading.Lock()
        self._by_cluster: dict[int, Peer] = {}

    def __len__(self) -> int:
        return len(self._by_cluster)

    def __iter__(self) -> Iterator[Peer]:
        with self._lock:
            return iter(list(self._by_cluster.values()))

    def start(self, job: Job, endpoint: WorkerEndpoint, fence: Fence | None) -> None:
        """Have the peer at ``endpoint`` serve a job.

        Raises:
            TransferError: there is neither a peer nor what a new one needs.
        """
        with self._lock:
            peer = self._by_cluster.get(endpoint.cluster_id)
            if peer is not None and peer.submit(job, fence):
                return
            self._make_room()
            try:
                peer = self._make(endpoint, job.control_address, self._forget)
                peer.submit(job, fence)
                peer.start()
            except (OSError, RuntimeError) as error:
                raise TransferError(f"nothing to serve it with: {error}") from None
            self._by_cluster[endpoint.cluster_id] = peer

    def give_up(self, request_id: str, reason: str) -> None:
        """The request's blocks are not wanted any more."""
        for peer in self:
            peer.give_up(request_id, reason)

    def close(self) -> None:
        """End them all, after the copies they are in."""
        for peer in self:
            peer.close()

    def _make_room(self) -> None:
        if len(self._by_cluster) < MAX_PEERS:
            return
        for peer in sorted(self._by_cluster.values(), key=lambda peer: peer.used_s):
            if peer.retire():
                return

    def _forget(self, peer: Peer) -> None:
        """A peer's thread is about to end; a newer one may have taken its place."""
        with self._lock:
            if self._by_cluster.get(peer.endpoint.cluster_id) is peer:
                del self._by_cluster[peer.endpoint.cluster_id]
