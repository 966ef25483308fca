"""D's worker: one thread per P rank, for the link to it and for all requests that come over it.

A thread serves its peer's jobs one after the other, so a stopped or dead peer delays nobody else.
It sleeps in ``poll`` when it has nothing to do, and ends when the peer's control connection is
lost; a restarted peer is another cluster and gets another thread. A pull runs on the thread; while
a release waits for P's confirmation, and while P pushes, the next job is served.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

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
from vllm_llmdd_connector.metadata import Job, PullJob, ReceiveJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Trace
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.completion import Completions
from vllm_llmdd_connector.worker.digest import DigestLog
from vllm_llmdd_connector.worker.receive import Receive, Receiver, ReserveEngine
from vllm_llmdd_connector.worker.releases import RESEND_S, Answer, PendingRelease, Releases

logger = get_logger(__name__)

_NOT_HELD = {
    Answer.GIVEN_UP: (
        "P had given the blocks up before they were read (its lease expired); raise lease_s or "
        "reduce D's queue"
    ),
    Answer.RESTARTED: "P was restarted while its blocks were read",
    Answer.NONE: "P did not confirm in time that it still held the blocks",
}


class PeerEngine(ReserveEngine, Protocol):
    """What a peer thread needs of the engine; ``DataDistEngine`` has it."""

    def link(self, endpoint: WorkerEndpoint) -> None: ...
    def unlink(self, endpoint: WorkerEndpoint) -> None: ...
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


@dataclass(slots=True)
class _Transfer:
    job: Job
    fence: Fence | None
    started_s: float
    deadline_s: float
    stage: str = "link"
    """Where it fails if the peer is lost now."""


class PeerThread:
    """All of one D rank's dealings with one P rank, and with that P's control channel."""

    def __init__(
        self,
        context: PeerContext,
        endpoint: WorkerEndpoint,
        control_address: tuple[str, int],
        on_end: Callable[["PeerThread"], None],
    ) -> None:
        self._context = context
        self.endpoint = endpoint
        self._control_address = control_address
        self._on_end = on_end
        self._queue: deque[_Transfer] = deque()
        # Every job that is not reported yet, by request id: whatever ends the thread, these are
        # failed.
        self._unreported: dict[str, _Transfer] = {}
        self._unwanted: deque[tuple[str, str]] = deque()
        self._releases = Releases()
        self._receiver = Receiver(context.engine, context.plans, endpoint.cluster_id)
        self._worker_dialer: Dialer | None = None
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

    def submit(self, job: Job, fence: Fence | None = None) -> bool:
        """Queue a job; False when the thread has ended and a new one is needed.

        ``fence``: device work that may still use the job's blocks; the copy waits for it.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._ended:
                return False
            transfer = _Transfer(job, fence, now_s, now_s + job.timeout_s)
            self._unreported[job.request_id] = transfer
            self._queue.append(transfer)
            self._wake.set()
        return True

    def give_up(self, request_id: str, reason: str) -> None:
        """The request's blocks are not wanted any more; one of another peer is no error."""
        with self._lock:
            if not self._ended and request_id in self._unreported:
                self._unwanted.append((request_id, reason))
                self._wake.set()

    def close(self) -> None:
        """End the thread after the copy it is in; unfinished jobs are reported as failed."""
        with self._lock:
            if not self._ended:
                self._stopping = True
                self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                dialer = stack.enter_context(closing(self._dial(self._control_address)))
                reason = self._serve(dialer, stack)
        except LinkError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("peer %x: the pull thread failed", self.endpoint.cluster_id)
            reason = f"internal error: {error}"
        self._end(reason)

    def _dial(self, address: tuple[str, int]) -> Dialer:
        return Dialer(self._context.zmq_context, *address)

    def _serve(self, dialer: Dialer, stack: ExitStack) -> str:
        """Until the peer is lost or the worker stops; returns why."""
        while not self._stopping:
            self._wait(dialer)
            for source in self._dialers(dialer):
                self._receive(source)
                if source.was_lost():
                    host, port = source.address
                    return f"the control connection to {host}:{port} was refused or lost"
            now_s = time.monotonic()
            self._releases.check(dialer, now_s)
            while self._unwanted:
                self._drop(*self._unwanted.popleft())
            self._receiver.check(self._worker_dialer, now_s)
            if self._queue:
                self._serve_next(dialer, stack)
        return "the worker is shutting down"

    def _dialers(self, dialer: Dialer) -> list[Dialer]:
        return [dialer] if self._worker_dialer is None else [dialer, self._worker_dialer]

    def _wait(self, dialer: Dialer) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.fileno(), zmq.POLLIN)
        for source in self._dialers(dialer):
            poller.register(source.socket, zmq.POLLIN)
            poller.register(source.monitor, zmq.POLLIN)
        timeout_ms = None
        due_s = min(self._releases.next_event_s(), self._receiver.next_event_s())
        if self._queue:
            timeout_ms = 0
        elif due_s < math.inf:
            timeout_ms = max(0, int((due_s - time.monotonic()) * 1000) + 1)
        poller.poll(timeout_ms)
        self._wake.clear()

    def _serve_next(self, dialer: Dialer, stack: ExitStack) -> None:
        transfer = self._queue.popleft()
        refusal = self._refusal(transfer)
        if refusal is not None:
            self._fail(transfer, *refusal)
            return
        try:
            self._link()
        except LinkError as error:
            # What is queued behind it would wait for the same link.
            for queued in [transfer, *self._take_queue()]:
                self._fail(queued, "link", str(error))
            return
        if isinstance(transfer.job, PullJob):
            self._pull(transfer, transfer.job, dialer)
        else:
            self._reserve(transfer, transfer.job, dialer, stack)

    def _refusal(self, transfer: _Transfer) -> tuple[str, str] | None:
        """Stage and reason why a job is not even tried, or None."""
        if self._context.completions.is_cancelled(transfer.job.request_id):
            return "queue", "aborted"
        if not transfer.job.groups:
            return "block map", "the block tables of the two servers do not fit"
        if time.monotonic() >= transfer.deadline_s:
            return "queue", f"waited {transfer.job.timeout_s:.0f} s behind other transfers"
        return None

    def _drop(self, request_id: str, reason: str) -> None:
        """A request is not wanted any more, whether it is queued or being pushed; a pull under way
        ends by itself."""
        for transfer in list(self._queue):
            if transfer.job.request_id == request_id:
                self._queue.remove(transfer)
                self._fail(transfer, "queue", reason)
        self._receiver.give_up(request_id, reason, self._worker_dialer)

    def _take_queue(self) -> list[_Transfer]:
        taken: list[_Transfer] = []
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

    # Pull: D copies, then P confirms.

    def _pull(self, transfer: _Transfer, job: PullJob, dialer: Dialer) -> None:
        try:
            self._copy(transfer, job)
        except TransferError as error:
            self._unlink()
            self._fail(transfer, "transfer", str(error))
            return
        now_s = time.monotonic()
        transfer.stage = "release"
        limit_s = now_s + self._context.config.release_timeout_s
        deadline_s = max(min(limit_s, transfer.deadline_s), now_s + RESEND_S)
        on_answer = partial(self._on_pull_confirmed, transfer, now_s)
        self._release(job, job.production, job.secret, deadline_s, on_answer, dialer)

    def _copy(self, transfer: _Transfer, job: PullJob) -> None:
        """All caches of one request; the engine copies without the GIL."""
        if transfer.fence is not None:
            transfer.fence.wait()
        started_s = time.monotonic()
        for plan in self._context.plans:
            group = job.groups[plan.group_index]
            if group.dst_blocks:
                begin_ns = time.monotonic_ns()
                self._context.engine.pull(
                    self.endpoint.cluster_id, plan, group.src_blocks, group.dst_blocks
                )
                self._context.stats.count("recv_transfers")
                self._context.trace.span(
                    "pull",
                    begin_ns,
                    time.monotonic_ns(),
                    **_names_of(job),
                    cache=plan.model_id,
                    layer_bytes=len(group.dst_blocks) * plan.block_len,
                )
        self._context.stats.observe("pull_seconds", time.monotonic() - started_s)

    def _on_pull_confirmed(self, transfer: _Transfer, released_s: float, answer: Answer) -> None:
        if answer is Answer.HELD:
            self._context.stats.observe("release_seconds", time.monotonic() - released_s)
            self._succeed(transfer)
        else:
            self._fail(transfer, "release", _NOT_HELD[answer])

    # Push: D reserves, P sends and confirms, D lets P use its blocks again.

    def _reserve(
        self, transfer: _Transfer, job: ReceiveJob, dialer: Dialer, stack: ExitStack
    ) -> None:
        if transfer.fence is not None:
            transfer.fence.wait()
        if self._worker_dialer is None:
            address = (self.endpoint.host, self.endpoint.control_port)
            self._worker_dialer = stack.enter_context(closing(self._dial(address)))
        transfer.stage = "push"
        receive = Receive(
            job,
            transfer.deadline_s,
            on_done=partial(self._on_pushed, transfer, job, dialer),
            on_failed=partial(self._fail, transfer, "push"),
            on_reserved=partial(self._on_reserved, job),
        )
        self._receiver.begin(receive, self._worker_dialer)

    def _on_reserved(self, job: ReceiveJob, reservation: int) -> None:
        self._context.trace.event("reserve", **_names_of(job), reservation=f"{reservation:x}")

    def _on_pushed(
        self, transfer: _Transfer, job: ReceiveJob, dialer: Dialer, production: int
    ) -> None:
        self._succeed(transfer)
        deadline_s = time.monotonic() + self._context.config.release_timeout_s
        on_answer = partial(_log_late_release, job.request_id)
        self._release(job, production, job.transfer_id, deadline_s, on_answer, dialer)

    # Both

    def _release(
        self,
        job: Job,
        production: int,
        secret: str,
        deadline_s: float,
        on_answer: Callable[[Answer], None],
        dialer: Dialer,
    ) -> None:
        self._context.trace.event("release", **_names_of(job))
        message = Release(
            session=job.session,
            claim_id=job.claim_id,
            rank=self._context.tp_rank,
            production=production,
            secret=secret,
        )
        release = PendingRelease(message, deadline_s, on_answer)
        self._releases.start(release, dialer, time.monotonic())

    def _receive(self, source: Dialer) -> None:
        messages, num_junk = source.receive()
        if num_junk:
            self._context.stats.count("junk_messages", num_junk)
        for message in messages:
            self._on_message(message, source)

    def _on_message(self, message: AnyMessage, source: Dialer) -> None:
        match message:
            case ReleaseAck():
                self._releases.on_ack(message)
            case Unknown():
                self._releases.end_session(message.session)
            case _ if source is self._worker_dialer:
                self._receiver.on_message(message, source)

    def _succeed(self, transfer: _Transfer) -> None:
        context, job = self._context, transfer.job
        context.trace.event("arrival", **_names_of(job))
        num_bytes = num_blocks = 0
        for plan, dst_blocks, first in self._arrived(job):
            num_bytes += len(dst_blocks) * plan.block_len * len(plan.regions)
            if context.digests is not None:
                context.digests.write(
                    "recv", job.request_id, job.transfer_id, plan, first, dst_blocks
                )
        num_blocks = sum(len(group.dst_blocks) for group in job.groups)
        context.stats.count("recv_bytes", num_bytes)
        context.stats.count("recv_blocks", num_blocks)
        context.stats.observe("recv_seconds", time.monotonic() - transfer.started_s)
        context.stats.count("recv_requests")
        self._unreported.pop(job.request_id, None)
        context.completions.succeed(job.request_id)

    def _arrived(self, job: Job) -> Iterator[tuple[CachePlan, list[int], int]]:
        for plan in self._context.plans:
            group = job.groups[plan.group_index]
            if group.dst_blocks:
                yield plan, group.dst_blocks, group.first_position

    def _fail(self, transfer: _Transfer, stage: str, reason: str) -> None:
        job = transfer.job
        self._unreported.pop(job.request_id, None)
        self._context.trace.event("failed", **_names_of(job), stage=stage, reason=reason)
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
        self._receiver.close(reason)
        self._unlink()
        with self._lock:
            self._ended = True
        for transfer in list(self._unreported.values()):
            self._fail(transfer, transfer.stage, reason)
        self._wake.close()
        logger.debug("peer %x: thread ended: %s", self.endpoint.cluster_id, reason)
        self._on_end(self)


def _names_of(job: Job) -> dict[str, Any]:
    return {"transfer": job.transfer_id, "request": job.request_id}


def _log_late_release(request_id: str, answer: Answer) -> None:
    if answer is Answer.NONE:
        logger.debug("request %s: P did not answer its release", request_id)
