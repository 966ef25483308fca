"""D's worker: a pull. D copies, compares checksums if it is to, and P confirms that it still held
the blocks; only then do they count."""

import time
from collections.abc import Callable
from functools import partial

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import Release
from vllm_llmdd_connector.deadlines import RESEND_S
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.metadata import Job, PullJob
from vllm_llmdd_connector.worker.peer_link import PeerContext, PeerLink
from vllm_llmdd_connector.worker.releases import Answer, PendingRelease, Releases
from vllm_llmdd_connector.worker.reports import Reports, Transfer, names_of
from vllm_llmdd_connector.worker.verify import PullChecks

_UNCONFIRMED = {
    Answer.GIVEN_UP: (
        "P had given the blocks up before they were read (its lease expired); raise lease_s or "
        "reduce D's queue"
    ),
    Answer.RESTARTED: "P was restarted while its blocks were read",
    Answer.NONE: "P did not confirm in time that it still held the blocks",
}


class Pulls:
    """Of one peer's thread, and on it."""

    def __init__(
        self,
        context: PeerContext,
        link: PeerLink,
        reports: Reports,
        releases: Releases,
        checks: PullChecks | None,
    ) -> None:
        self._context = context
        self._link = link
        self._reports = reports
        self._releases = releases
        self._checks = checks

    def begin(
        self,
        transfer: Transfer,
        job: PullJob,
        dialer: Dialer,
        dial_worker: Callable[[], Dialer],
    ) -> None:
        """Copy, and go on as far as P need not be waited for.

        ``dialer`` leads to P's scheduler; ``dial_worker`` to P's rank, for checksums.
        """
        try:
            self._copy(transfer, job)
        except TransferError as error:
            self._link.drop()
            self._reports.failed(transfer, "transfer", str(error))
            return
        if self._checks is None:
            self._release(transfer, job, dialer)
            return
        transfer.stage = "integrity"
        on_verdict = partial(self._on_compared, transfer, job, dialer)
        self._checks.begin(job, transfer.deadline_s, on_verdict, dial_worker())

    def _copy(self, transfer: Transfer, job: PullJob) -> None:
        """All caches of one request; the engine copies without the GIL."""
        context = self._context
        if transfer.fence is not None:
            transfer.fence.wait()
        started_s = time.monotonic()
        for plan in context.plans:
            group = job.groups[plan.group_index]
            if group.dst_blocks:
                begin_ns = time.monotonic_ns()
                context.engine.pull(self._link.cluster_id, plan, group.src_blocks, group.dst_blocks)
                context.stats.count("recv_transfers")
                context.trace.span(
                    "pull",
                    begin_ns,
                    time.monotonic_ns(),
                    **names_of(job),
                    cache=plan.model_id,
                    layer_bytes=len(group.dst_blocks) * plan.block_len,
                )
        context.stats.observe("pull_seconds", time.monotonic() - started_s)

    def _on_compared(self, transfer: Transfer, job: PullJob, dialer: Dialer, problem: str) -> None:
        if problem:
            self._reports.failed(transfer, "integrity", problem)
        else:
            self._release(transfer, job, dialer)

    def _release(self, transfer: Transfer, job: PullJob, dialer: Dialer) -> None:
        now_s = time.monotonic()
        transfer.stage = "release"
        config = self._context.config
        limits = {
            "release_timeout_s": now_s + config.release_timeout_s,
            "request_timeout_s": transfer.deadline_s,
        }
        tightest = min(limits, key=lambda option: limits[option])
        deadline_s = max(limits[tightest], now_s + RESEND_S)
        on_answer = partial(self._on_confirmed, transfer, now_s, config.within(tightest))
        self._context.trace.event("release", **names_of(job))
        message = release_of(job, self._context.tp_rank, job.production, job.secret)
        self._releases.start(PendingRelease(message, deadline_s, on_answer), dialer, now_s)

    def _on_confirmed(
        self, transfer: Transfer, released_s: float, within: str, answer: Answer
    ) -> None:
        if answer is Answer.HELD:
            self._context.stats.observe("release_seconds", time.monotonic() - released_s)
            self._reports.succeeded(transfer)
            return
        reason = _UNCONFIRMED[answer]
        if answer is Answer.NONE:
            reason = f"{reason}: {within}"
        self._reports.failed(transfer, "release", reason)


def release_of(job: Job, rank: int, production: int, secret: str) -> Release:
    """D's word that this rank needs nothing more of a prompt."""
    return Release(
        session=job.session,
        claim_id=job.claim_id,
        rank=rank,
        production=production,
        secret=secret,
    )
