"""D's worker: one thread per P rank, for the link to it and for all requests that come over it.

A thread serves its peer's jobs one after the other, so a stopped or dead peer delays nobody else.
It sleeps in ``poll`` when it has nothing to do, and ends when the peer's control connection is
lost, or when nothing has come for long; a restarted peer is another cluster and gets another
thread. A pull runs on the thread; while a release waits for P's confirmation, and while P pushes,
the next job is served.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial

from vllm_llmdd_connector.control.channel import Dialer, Sleeper
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    Done,
    NoSums,
    ReleaseAck,
    Sums,
    Unknown,
    WorkerEndpoint,
)
from vllm_llmdd_connector.deadlines import PEER_IDLE_S
from vllm_llmdd_connector.errors import LinkError
from vllm_llmdd_connector.log import get_logger, one_line
from vllm_llmdd_connector.metadata import Job, PullJob, ReceiveJob
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.peer_link import PeerContext, PeerLink, quiet_peer
from vllm_llmdd_connector.worker.pull import Pulls, release_of
from vllm_llmdd_connector.worker.receive import Receive, Receiver
from vllm_llmdd_connector.worker.releases import Answer, PendingRelease, Releases
from vllm_llmdd_connector.worker.reports import Reports, Transfer, names_of
from vllm_llmdd_connector.worker.verify import PullChecks

logger = get_logger(__name__)

_SHUTTING_DOWN = "the worker is shutting down"
_UNUSED = "it was not used any more"


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
        self._queue: deque[Transfer] = deque()
        # Every job that is not reported yet, by request id: whatever ends the thread, these are
        # failed.
        self._unreported: dict[str, Transfer] = {}
        self._unwanted: deque[tuple[str, str]] = deque()
        self._releases = Releases()
        self._checks: PullChecks | None = None
        if context.verifier is not None:
            limit = context.config.within("request_timeout_s")
            self._checks = PullChecks(context.verifier, endpoint.cluster_id, limit)
        self._link = PeerLink(context.engine, endpoint, context.stats)
        self._receiver = Receiver(
            context.engine,
            context.plans,
            endpoint.cluster_id,
            context.receive_limits,
            self._link,
        )
        self._reports = Reports(context, endpoint, self._forget)
        self._pulls = Pulls(context, self._link, self._reports, self._releases, self._checks)
        self._worker_dialer: Dialer | None = None
        self._sleeper = Sleeper()
        self._lock = threading.Lock()
        self.used_s = time.monotonic()
        """When a job has last come, or was still served."""
        self._retiring = False
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(
            target=self._run, name=f"llmdd-peer-{endpoint.cluster_id:x}", daemon=True
        )

    def start(self) -> None:
        """Begin to serve. A job queued before this is never lost to a peer that is already gone.

        Raises:
            RuntimeError: no thread is to be had; nothing is left of this object.
        """
        try:
            self._thread.start()
        except RuntimeError:
            self._sleeper.close()
            raise

    def submit(self, job: Job, fence: Fence | None = None) -> bool:
        """Queue a job; False when the thread has ended and a new one is needed.

        ``fence``: device work that may still use the job's blocks; the copy waits for it.
        """
        now_s = time.monotonic()
        with self._lock:
            if self._ended:
                return False
            transfer = Transfer(job, fence, now_s, now_s + job.timeout_s)
            self._unreported[job.request_id] = transfer
            self._queue.append(transfer)
            self.used_s = now_s
            self._retiring = False
            self._sleeper.wake()
        return True

    def retire(self) -> bool:
        """End the thread and its link if it has nothing to do; False if it has."""
        with self._lock:
            if self._ended or self._retiring or self._unreported:
                return False
            self._retiring = True
            self._sleeper.wake()
        return True

    def give_up(self, request_id: str, reason: str) -> None:
        """The request's blocks are not wanted any more; one of another peer is no error."""
        with self._lock:
            if not self._ended and request_id in self._unreported:
                self._unwanted.append((request_id, reason))
                self._sleeper.wake()

    def close(self) -> None:
        """End the thread after the copy it is in; unfinished jobs are reported as failed."""
        with self._lock:
            if not self._ended:
                self._stopping = True
                self._sleeper.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                dialer = stack.enter_context(closing(self._dial(self._control_address)))
                reason = self._serve(dialer, stack)
        except LinkError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("peer %x: its thread failed", self.endpoint.cluster_id)
            reason = f"internal error: {error}"
        self._end(reason)

    def _dial(self, address: tuple[str, int]) -> Dialer:
        dialer = Dialer(self._context.zmq_context, *address, self._context.keys)
        self._sleeper.watch(dialer.socket, dialer.monitor)
        return dialer

    def _serve(self, dialer: Dialer, stack: ExitStack) -> str:
        """Until the peer is lost or the worker stops; returns why."""
        while not self._stopping or len(self._receiver):
            self._sleeper.sleep(self._timeout_ms())
            for source in self._dialers(dialer):
                self._receive(source)
                if source.was_lost():
                    return source.loss
            now_s = time.monotonic()
            self._releases.check(dialer, now_s)
            if self._checks is not None:
                self._checks.check(self._worker_dialer, now_s)
            while self._unwanted:
                self._drop(*self._unwanted.popleft())
            if self._stopping:
                self._receiver.give_up_all(_SHUTTING_DOWN, self._worker_dialer, now_s)
            lost = self._receiver.check(self._worker_dialer, now_s)
            if lost:
                return lost
            if self._queue and not self._stopping and now_s >= self._next_turn_s():
                self._serve_next(dialer, stack)
            if self._is_unused(now_s) and self._ends_unused():
                return _UNUSED
        return _SHUTTING_DOWN

    def _is_unused(self, now_s: float) -> bool:
        """Whether to end for want of work."""
        with self._lock:
            if self._unreported or len(self._releases):
                self.used_s = now_s
                return False
            return self._retiring or now_s >= self.used_s + PEER_IDLE_S

    def _ends_unused(self) -> bool:
        """Drop the link and take no job any more, unless one has come meanwhile."""
        # In this order, because a successor may link the same peer.
        self._link.drop()
        with self._lock:
            self._retiring = False
            self._ended = not self._unreported
            return self._ended

    def _next_turn_s(self) -> float:
        """When the oldest job is to be served, or is too late.

        No pull goes beside a push over a link, which an engine without reservations needs, and no
        link is made anew under a push.
        """
        may_overlap = self._context.engine.has_reservations or not len(self._receiver)
        head = self._queue[0]
        if may_overlap or (self._link.is_made and isinstance(head.job, ReceiveJob)):
            return 0.0
        return head.deadline_s

    def _dialers(self, dialer: Dialer) -> list[Dialer]:
        return [dialer] if self._worker_dialer is None else [dialer, self._worker_dialer]

    def _timeout_ms(self) -> int:
        unused_s = self.used_s + PEER_IDLE_S
        due_s = min(self._releases.next_event_s(), self._receiver.next_event_s(), unused_s)
        if self._checks is not None:
            due_s = min(due_s, self._checks.next_event_s())
        if self._queue and not self._stopping:
            due_s = min(due_s, self._next_turn_s())
        return max(0, int((due_s - time.monotonic()) * 1000) + 1)

    def _serve_next(self, dialer: Dialer, stack: ExitStack) -> None:
        transfer = self._queue.popleft()
        refusal = self._refusal(transfer)
        if refusal is not None:
            self._reports.failed(transfer, *refusal)
            return
        try:
            self._make_link(stack)
        except LinkError as error:
            # What is queued behind it would wait for the same link.
            for queued in [transfer, *self._take_queue()]:
                self._reports.failed(queued, "link", str(error))
            return
        if isinstance(transfer.job, PullJob):
            self._pulls.begin(transfer, transfer.job, dialer, partial(self._dial_worker, stack))
        else:
            self._reserve(transfer, transfer.job, dialer, stack)

    def _refusal(self, transfer: Transfer) -> tuple[str, str] | None:
        """Stage and reason why a job is not even tried, or None."""
        if self._context.completions.is_cancelled(transfer.job.request_id):
            return "queue", "aborted"
        if not transfer.job.groups:
            return "block map", "the block tables of the two servers do not fit"
        if time.monotonic() >= transfer.deadline_s:
            limit = self._context.config.within("request_timeout_s")
            return "queue", f"its turn behind other transfers did not come {limit}"
        return None

    def _drop(self, request_id: str, reason: str) -> None:
        """A request is not wanted any more, whether it is queued, being pushed or compared; a copy
        under way ends by itself."""
        for transfer in list(self._queue):
            if transfer.job.request_id == request_id:
                self._queue.remove(transfer)
                self._reports.failed(transfer, "queue", reason)
        if self._checks is not None:
            self._checks.give_up(request_id, reason)
        self._receiver.give_up(request_id, reason, self._worker_dialer, time.monotonic())

    def _take_queue(self) -> list[Transfer]:
        taken: list[Transfer] = []
        while self._queue:
            taken.append(self._queue.popleft())
        return taken

    def _make_link(self, stack: ExitStack) -> None:
        if self._link.is_made:
            return
        self._link.count()
        if not self._context.engine.has_reservations and self.endpoint.control_port:
            quiet_peer(
                self._dial_worker(stack),
                self.endpoint,
                self._context.engine.cluster_id,
                self._link.number,
                self._context.receive_limits,
            )
        self._link.make()

    def _dial_worker(self, stack: ExitStack) -> Dialer:
        if self._worker_dialer is None:
            address = (self.endpoint.host, self.endpoint.control_port)
            self._worker_dialer = stack.enter_context(closing(self._dial(address)))
        return self._worker_dialer

    # Push: D reserves, P sends and confirms, D lets P use its blocks again.

    def _reserve(
        self, transfer: Transfer, job: ReceiveJob, dialer: Dialer, stack: ExitStack
    ) -> None:
        if transfer.fence is not None:
            transfer.fence.wait()
        worker_dialer = self._dial_worker(stack)
        transfer.stage = "push"
        receive = Receive(
            job,
            transfer.deadline_s,
            on_done=partial(self._on_pushed, transfer, job, dialer),
            on_failed=partial(self._on_push_failed, transfer),
            on_reserved=partial(self._on_reserved, job),
        )
        self._receiver.begin(receive, worker_dialer)

    def _on_reserved(self, job: ReceiveJob, reservation: int) -> None:
        self._context.trace.event("reserve", **names_of(job), reservation=f"{reservation:x}")

    def _on_push_failed(self, transfer: Transfer, reason: str) -> None:
        self._reports.failed(transfer, "push", one_line(reason))

    def _on_pushed(self, transfer: Transfer, job: ReceiveJob, dialer: Dialer, done: Done) -> None:
        if self._context.verifier is not None:
            problem = self._context.verifier.verify(job, done.reservation, done.sums)
            if problem:
                self._reports.failed(transfer, "integrity", problem)
                return
        self._reports.succeeded(transfer)
        now_s = time.monotonic()
        deadline_s = now_s + self._context.config.release_timeout_s
        on_answer = partial(_log_late_release, job.request_id)
        self._context.trace.event("release", **names_of(job))
        message = release_of(job, self._context.tp_rank, done.production, job.transfer_id)
        self._releases.start(PendingRelease(message, deadline_s, on_answer), dialer, now_s)

    def _forget(self, request_id: str) -> None:
        self._unreported.pop(request_id, None)

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
            case Sums() | NoSums() if self._checks is not None:
                self._checks.on_message(message)
            case _ if source is self._worker_dialer:
                self._receiver.on_message(message, source, time.monotonic())

    def _end(self, reason: str) -> None:
        """Nobody waits for ever: what is left is failed, the link dropped."""
        # Before anything is reported, because P may write into it; and before this has ended,
        # because then a successor may link the same peer.
        self._link.drop()
        self._receiver.close(reason, time.monotonic())
        with self._lock:
            self._ended = True
        for transfer in list(self._unreported.values()):
            self._reports.failed(transfer, transfer.stage, reason)
        self._sleeper.close()
        logger.debug("peer %x: thread ended: %s", self.endpoint.cluster_id, reason)
        self._on_end(self)


def _log_late_release(request_id: str, answer: Answer) -> None:
    if answer is Answer.NONE:
        logger.debug("request %s: P did not answer its release", request_id)
