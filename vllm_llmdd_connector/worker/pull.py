"""D's worker: one thread per P rank that links, pulls and confirms, in that order.

A thread serves its peer's jobs one after the other, so a stopped or dead peer delays nobody else.
It sleeps in ``poll`` when it has nothing to do, and ends when the peer's control connection is
lost; a restarted peer is another cluster and gets another thread. While a release waits for P's
confirmation the next pull runs.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import zmq

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Dialer, Wake
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Release,
    ReleaseAck,
    Unknown,
    WorkerEndpoint,
)
from vllm_llmdd_connector.errors import LinkError, TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import PullJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.digest import DigestLog

logger = get_logger(__name__)

RESEND_S = 1.0
"""A release without an answer is sent again after this long; P answers each the same."""


class PullEngine(Protocol):
    """What a peer thread needs of the engine; ``DataDistEngine`` has it."""

    def link(self, endpoint: WorkerEndpoint) -> None: ...
    def unlink(self, endpoint: WorkerEndpoint) -> None: ...
    def pull(
        self, peer_cluster_id: int, plan: CachePlan, src_blocks: list[int], dst_blocks: list[int]
    ) -> None: ...


@dataclass(slots=True)
class PullContext:
    """What all peer threads of a worker share."""

    config: ConnectorConfig
    engine: PullEngine
    plans: list[CachePlan]
    completions: Completions
    stats: TransferStats
    digests: DigestLog | None
    zmq_context: "zmq.Context[zmq.Socket[bytes]]"
    tp_rank: int


@dataclass(slots=True)
class _Pull:
    job: PullJob
    fence: Fence | None
    started_s: float
    deadline_s: float
    released_s: float = 0.0
    sent_s: float = 0.0
    ack_deadline_s: float = 0.0


class PeerThread:
    """All of one D rank's dealings with one P rank, and with that P's control channel."""

    def __init__(
        self,
        context: PullContext,
        endpoint: WorkerEndpoint,
        control_address: tuple[str, int],
        on_end: Callable[["PeerThread"], None],
    ) -> None:
        self._context = context
        self.endpoint = endpoint
        self._control_address = control_address
        self._on_end = on_end
        self._queue: deque[_Pull] = deque()
        self._awaiting: dict[int, _Pull] = {}
        # Every job that is not reported yet, by request id: whatever ends the thread, these are
        # failed.
        self._unreported: dict[str, _Pull] = {}
        self._wake = Wake()
        self._lock = threading.Lock()
        self._stopping = False
        self._is_linked = False
        self._ended = False
        self._thread = threading.Thread(
            target=self._run, name=f"llmdd-peer-{endpoint.cluster_id:x}", daemon=True
        )

    def start(self) -> None:
        """Begin to serve. A job queued before this is never lost to a peer that is already gone."""
        self._thread.start()

    def submit(self, job: PullJob, fence: Fence | None = None) -> bool:
        """Queue a job; False when the thread has ended and a new one is needed.

        ``fence``: device work that may still use the job's blocks; the copy waits for it.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._ended:
                return False
            pull = _Pull(job, fence, now_s, now_s + job.timeout_s)
            self._unreported[job.request_id] = pull
            self._queue.append(pull)
            self._wake.set()
        return True

    def close(self) -> None:
        """End the thread after the copy it is in; unfinished jobs are reported as failed."""
        with self._lock:
            if not self._ended:
                self._stopping = True
                self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with closing(self._dial()) as dialer:
                reason = self._serve(dialer)
        except LinkError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("peer %x: the pull thread failed", self.endpoint.cluster_id)
            reason = f"internal error: {error}"
        self._end(reason)

    def _dial(self) -> Dialer:
        return Dialer(self._context.zmq_context, *self._control_address)

    def _serve(self, dialer: Dialer) -> str:
        """Until the peer is lost or the worker stops; returns why."""
        poller = zmq.Poller()
        for source in (self._wake.fileno(), dialer.socket, dialer.monitor):
            poller.register(source, zmq.POLLIN)
        while not self._stopping:
            poller.poll(self._poll_timeout_ms())
            self._wake.clear()
            self._receive_acks(dialer)
            if dialer.was_lost():
                host, port = self._control_address
                return f"the control connection to {host}:{port} was refused or lost"
            self._check_acks(dialer)
            if self._queue:
                self._serve_next(dialer)
        return "the worker is shutting down"

    def _poll_timeout_ms(self) -> int | None:
        if self._queue:
            return 0
        if not self._awaiting:
            return None
        due_s = min(
            min(pull.ack_deadline_s, pull.sent_s + RESEND_S) for pull in self._awaiting.values()
        )
        return max(0, int((due_s - time.monotonic()) * 1000) + 1)

    def _serve_next(self, dialer: Dialer) -> None:
        pull = self._queue.popleft()
        refusal = self._refusal(pull)
        if refusal is not None:
            self._fail(pull, *refusal)
            return
        try:
            self._link()
        except LinkError as error:
            # What is queued behind it would wait for the same link.
            for queued in [pull, *self._take_queue()]:
                self._fail(queued, "link", str(error))
            return
        try:
            self._copy(pull)
        except TransferError as error:
            self._unlink()
            self._fail(pull, "transfer", str(error))
            return
        self._release(pull, dialer)

    def _refusal(self, pull: _Pull) -> tuple[str, str] | None:
        """Stage and reason why a job is not even tried, or None."""
        if self._context.completions.is_cancelled(pull.job.request_id):
            return "queue", "aborted"
        if not pull.job.groups:
            return "block map", "the block tables of the two servers do not fit"
        if time.monotonic() >= pull.deadline_s:
            return "queue", f"waited {pull.job.timeout_s:.0f} s behind other transfers"
        return None

    def _take_queue(self) -> list[_Pull]:
        taken: list[_Pull] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken

    def _link(self) -> None:
        """Link on first use; one failure may be a peer that is just starting, so try twice."""
        if self._is_linked:
            return
        started_s = time.monotonic()
        try:
            self._context.engine.link(self.endpoint)
        except LinkError as error:
            logger.warning("peer %x: linking again: %s", self.endpoint.cluster_id, error)
            self._context.engine.unlink(self.endpoint)
            self._context.engine.link(self.endpoint)
        self._is_linked = True
        took_s = time.monotonic() - started_s
        self._context.stats.observe("link_seconds", took_s)
        logger.info("peer %x: linked in %.1f ms", self.endpoint.cluster_id, took_s * 1000)

    def _unlink(self) -> None:
        if self._is_linked:
            self._is_linked = False
            self._context.engine.unlink(self.endpoint)

    def _copy(self, pull: _Pull) -> None:
        """All caches of one request; the engine copies without the GIL."""
        if pull.fence is not None:
            pull.fence.wait()
        started_s = time.monotonic()
        num_bytes = num_blocks = num_transfers = 0
        for plan, src_blocks, dst_blocks, _ in self._transfers(pull.job):
            self._context.engine.pull(self.endpoint.cluster_id, plan, src_blocks, dst_blocks)
            num_bytes += len(dst_blocks) * plan.block_len * len(plan.regions)
            num_transfers += 1
        num_blocks = sum(len(group.dst_blocks) for group in pull.job.groups)
        stats = self._context.stats
        stats.observe("pull_seconds", time.monotonic() - started_s)
        stats.count("recv_bytes", num_bytes)
        stats.count("recv_blocks", num_blocks)
        stats.count("recv_transfers", num_transfers)

    def _transfers(self, job: PullJob) -> Iterator[tuple[CachePlan, list[int], list[int], int]]:
        for plan in self._context.plans:
            group = job.groups[plan.group_index]
            if group.dst_blocks:
                yield plan, group.src_blocks, group.dst_blocks, group.first_position

    def _release(self, pull: _Pull, dialer: Dialer) -> None:
        now_s = time.monotonic()
        pull.released_s = now_s
        limit_s = now_s + self._context.config.release_timeout_s
        pull.ack_deadline_s = max(min(limit_s, pull.deadline_s), now_s + RESEND_S)
        self._awaiting[pull.job.claim_id] = pull
        self._send_release(pull, dialer, now_s)

    def _send_release(self, pull: _Pull, dialer: Dialer, now_s: float) -> None:
        pull.sent_s = now_s
        message = Release(
            session=pull.job.session,
            claim_id=pull.job.claim_id,
            rank=self._context.tp_rank,
            production=pull.job.production,
            secret=pull.job.secret,
        )
        dialer.send([message])

    def _receive_acks(self, dialer: Dialer) -> None:
        messages, num_junk = dialer.receive()
        if num_junk:
            self._context.stats.count("junk_messages", num_junk)
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: AnyMessage) -> None:
        match message:
            case ReleaseAck():
                self._on_ack(message)
            case Unknown():
                for pull in list(self._awaiting.values()):
                    if pull.job.session == message.session:
                        del self._awaiting[pull.job.claim_id]
                        self._fail(pull, "release", "P was restarted while its blocks were read")

    def _on_ack(self, ack: ReleaseAck) -> None:
        pull = self._awaiting.get(ack.claim_id)
        if pull is None or pull.job.production != ack.production:
            return
        del self._awaiting[ack.claim_id]
        if not ack.valid:
            self._fail(
                pull,
                "release",
                "P had given the blocks up before they were read (its lease expired); raise "
                "lease_s or reduce D's queue",
            )
            return
        self._succeed(pull)

    def _succeed(self, pull: _Pull) -> None:
        context, job, now_s = self._context, pull.job, time.monotonic()
        context.stats.observe("release_seconds", now_s - pull.released_s)
        if context.digests is not None:
            for plan, _, dst_blocks, first in self._transfers(job):
                context.digests.write(
                    "recv", job.request_id, job.transfer_id, plan, first, dst_blocks
                )
        context.stats.observe("recv_seconds", now_s - pull.started_s)
        context.stats.count("recv_requests")
        self._unreported.pop(job.request_id, None)
        context.completions.succeed(job.request_id)

    def _check_acks(self, dialer: Dialer) -> None:
        now_s = time.monotonic()
        for claim_id, pull in list(self._awaiting.items()):
            if now_s >= pull.ack_deadline_s:
                del self._awaiting[claim_id]
                self._fail(
                    pull, "release", "P did not confirm in time that it still held the blocks"
                )
            elif now_s - pull.sent_s >= RESEND_S:
                self._send_release(pull, dialer, now_s)

    def _fail(self, pull: _Pull, stage: str, reason: str) -> None:
        job = pull.job
        self._unreported.pop(job.request_id, None)
        if not self._context.completions.is_cancelled(job.request_id):
            self._context.stats.count_failure(stage)
            logger.error(
                "request %s: stage %s failed, prefill server %s, cluster %x: %s",
                job.request_id,
                stage,
                self.endpoint.host,
                self.endpoint.cluster_id,
                reason,
            )
        self._context.completions.fail(job.request_id, f"{stage}: {reason}")

    def _end(self, reason: str) -> None:
        """Nobody waits for ever: what is left is failed, the link dropped."""
        # First: once this has ended, a successor may link the same peer.
        self._unlink()
        with self._lock:
            self._ended = True
        for pull in list(self._unreported.values()):
            stage = "release" if pull.released_s else "link"
            self._fail(pull, stage, reason)
        self._wake.close()
        logger.debug("peer %x: thread ended: %s", self.endpoint.cluster_id, reason)
        self._on_end(self)
