"""D's worker: the link to one P rank, and what the threads of all P ranks share."""

import time
from dataclasses import dataclass
from typing import Protocol

import zmq

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.keys import KeySet
from vllm_llmdd_connector.control.messages import CancelAck, CancelAll, WorkerEndpoint
from vllm_llmdd_connector.errors import LinkError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Trace
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.digest import DigestLog
from vllm_llmdd_connector.worker.receive import ReceiveLimits, ReserveEngine
from vllm_llmdd_connector.worker.verify import Verifier

logger = get_logger(__name__)


class LinkEngine(Protocol):
    """What a ``PeerLink`` needs of the engine; ``DataDistEngine`` has it."""

    def link(self, endpoint: WorkerEndpoint) -> None: ...
    def unlink(self, endpoint: WorkerEndpoint) -> None: ...


class PeerEngine(ReserveEngine, LinkEngine, Protocol):
    """What a peer thread needs of the engine; ``DataDistEngine`` has it."""

    def pull(
        self, peer_cluster_id: int, plan: CachePlan, src_blocks: list[int], dst_blocks: list[int]
    ) -> None: ...


@dataclass(slots=True)
class PeerContext:
    """What all peer threads of a worker share."""

    config: ConnectorConfig
    engine: PeerEngine
    plans: list[CachePlan]
    completions: Completions
    stats: TransferStats
    digests: DigestLog | None
    zmq_context: "zmq.Context[zmq.Socket[bytes]]"
    tp_rank: int
    trace: Trace = NO_TRACE
    keys: KeySet | None = None
    verifier: Verifier | None = None
    """With option ``integrity``."""

    @property
    def receive_limits(self) -> ReceiveLimits:
        """P may take a call over a link that is under way there, and its answer, to say that it
        writes nothing of a request any more."""
        cancel_s = self.config.sync_kv_timeout_ms / 1000 + self.config.release_timeout_s
        return ReceiveLimits(
            cancel_s,
            f"within {cancel_s:g} s (raise sync_kv_timeout_ms or release_timeout_s)",
            self.config.within("request_timeout_s"),
        )


class PeerLink:
    """Made on first use, and anew when it was dropped; on the peer's thread."""

    def __init__(self, engine: LinkEngine, endpoint: WorkerEndpoint, stats: TransferStats) -> None:
        self._engine = engine
        self._endpoint = endpoint
        self._stats = stats
        self.is_made = False
        self.number = 0
        """Of the link that is made or about to be; they count upwards over all threads."""

    @property
    def cluster_id(self) -> int:
        """Of P's rank."""
        return self._endpoint.cluster_id

    def count(self) -> None:
        """Another link is about to be made."""
        self.number = time.monotonic_ns()

    def make(self) -> None:
        """One failure may be a peer that is just starting, so try twice.

        Raises:
            LinkError: names the peer and what the engine says.
        """
        cluster_id = self._endpoint.cluster_id
        started_s = time.monotonic()
        try:
            self._engine.link(self._endpoint)
        except LinkError as error:
            logger.warning("peer %x: linking again: %s", cluster_id, error)
            self._engine.unlink(self._endpoint)
            self._engine.link(self._endpoint)
        self.is_made = True
        took_s = time.monotonic() - started_s
        self._stats.observe("link_seconds", took_s)
        logger.info("peer %x: linked in %.1f ms", cluster_id, took_s * 1000)

    def drop(self) -> None:
        if self.is_made:
            self.is_made = False
            self._engine.unlink(self._endpoint)


def quiet_peer(
    dialer: Dialer,
    endpoint: WorkerEndpoint,
    own_cluster_id: int,
    link_number: int,
    limits: ReceiveLimits,
) -> None:
    """Have P write nothing more of what this rank has reserved for earlier links.

    For an engine without reservations, before a link is made: P does not know that an earlier one
    was dropped, and would go on over the new one, into blocks that are another request's by now.

    Raises:
        LinkError: P does not confirm it.
    """
    host, port = dialer.address
    cancel = CancelAll(
        to_cluster=endpoint.cluster_id, cluster_id=own_cluster_id, link_number=link_number
    )
    dialer.send([cancel])
    poller = zmq.Poller()
    poller.register(dialer.socket, zmq.POLLIN)
    poller.register(dialer.monitor, zmq.POLLIN)
    deadline_s = time.monotonic() + limits.cancel_timeout_s
    while True:
        messages, _ = dialer.receive()
        if CancelAck() in messages:
            return
        if dialer.was_lost():
            raise LinkError(dialer.loss)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkError(
                f"P's worker at {host}:{port} did not confirm {limits.within_cancel} that it "
                "writes nothing of earlier requests; see whether its process is stopped"
            )
        poller.poll(int(left_s * 1000) + 1)
