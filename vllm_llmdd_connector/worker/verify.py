"""D's worker: compares the checksums of what has arrived with P's, before a request is reported.

On the thread of the peer. For a push P's sums come with ``Done``; for a pull D asks P's worker once
it has copied, and sums its own blocks while P does the same.
"""

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import AskSums, BlockSpan, GroupSums, NoSums, Sums
from vllm_llmdd_connector.deadlines import RESEND_S
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import one_line
from vllm_llmdd_connector.metadata import Job, PullJob
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.worker.checksum import (
    SUM_BYTES,
    BlockReader,
    Place,
    Policy,
    chosen,
    unpack,
)

_MAX_NAMED = 8
"""Bad blocks that an error names; the others are counted."""
ABORTED = "aborted"


class Verifier:
    """Sums D's blocks and compares; no state of its own, so all peers' threads share it."""

    def __init__(
        self,
        plans: Sequence[CachePlan],
        policy: Policy,
        reader: BlockReader,
        stats: TransferStats,
        is_cancelled: Callable[[str], bool],
    ) -> None:
        """``is_cancelled`` is asked with a request's id: of one that was aborted no block is read
        any more."""
        self._plans = list(plans)
        self._policy: Policy = policy
        self._reader = reader
        self._stats = stats
        self._is_cancelled = is_cancelled

    def own_sums(self, job: Job, number: int) -> dict[Place, int] | None:
        """Of D's blocks that P may have summed for transfer ``number``; None after an abort."""
        sums: dict[Place, int] = {}
        for plan in self._plans:
            group = job.groups[plan.group_index]
            first, count = group.first_position, len(group.dst_blocks)
            # Whether P sums a last block that is not full is known with its answer only.
            positions = {
                *chosen(self._policy, number, first, count),
                *chosen(self._policy, number, first, max(0, count - 1)),
            }
            blocks = {
                (plan.group_index, position): group.dst_blocks[position - first]
                for position in sorted(positions)
            }
            for region in range(len(plan.regions)):
                if not self._reader.add(
                    plan, region, blocks, sums, lambda: self._is_cancelled(job.request_id)
                ):
                    return None
        return sums

    def verify(self, job: Job, number: int, theirs: Sequence[GroupSums]) -> str:
        """As ``compare``, summing D's blocks first."""
        own = self.own_sums(job, number)
        return ABORTED if own is None else self.compare(job, number, own, theirs)

    def compare(
        self, job: Job, number: int, own: dict[Place, int], theirs: Sequence[GroupSums]
    ) -> str:
        """Why the blocks are not those of P; empty when they are."""
        if len(theirs) != len(job.groups):
            return f"P sent checksums of {len(theirs)} KV cache groups, expected {len(job.groups)}"
        bad: list[str] = []
        bad_groups: set[int] = set()
        num_checked = 0
        for index, sums in enumerate(theirs):
            group = job.groups[index]
            first, num_blocks = group.first_position, len(group.dst_blocks)
            positions = chosen(self._policy, number, first, min(sums.count, num_blocks))
            # P may leave out a last block that it still writes to, and no other.
            if not num_blocks - 1 <= sums.count <= num_blocks or (
                len(sums.sums) != SUM_BYTES * len(positions)
            ):
                return (
                    f"P sent {len(sums.sums) // SUM_BYTES} checksums for {sums.count} blocks of KV "
                    f"cache group {index}, expected {len(positions)} for {num_blocks}"
                )
            for position, value in zip(positions, unpack(sums.sums), strict=True):
                if own[index, position] != value:
                    block = group.dst_blocks[position - first]
                    bad.append(f"block {position} of the prompt (KV cache group {index}, {block})")
                    bad_groups.add(index)
            num_checked += len(positions)
        self._stats.count("integrity_checked_blocks", num_checked)
        if not bad:
            return ""
        self._stats.count("integrity_failed_blocks", len(bad))
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        return (
            f"{len(bad)} of {num_checked} checked blocks differ from P's: "
            f"{', '.join(bad[:_MAX_NAMED])}{more}; "
            f"{', '.join(map(self._summed_layers, sorted(bad_groups)))}; if it comes again, test "
            "memory and network of both machines (kv_digest names the layer)"
        )

    def _summed_layers(self, group_index: int) -> str:
        """One sum is over a block in all of them, so which of them differs is not known."""
        layers: dict[str, None] = {}
        for plan in self._plans:
            if plan.group_index == group_index:
                for region in plan.regions:
                    layers |= dict.fromkeys(region.layers or (region.name,))
        first, *_, last = [*layers, *layers]
        return f"a sum of group {group_index} is over {len(layers)} layers, {first} to {last}"


@dataclass(slots=True)
class _Pending:
    """A pull that waits for P's checksums."""

    job: PullJob
    question: AskSums
    deadline_s: float
    on_verdict: Callable[[str], None]
    own: dict[Place, int] = field(default_factory=dict)
    sent_s: float = 0.0


class PullChecks:
    """All pulls of one peer's thread that are being compared."""

    def __init__(self, verifier: Verifier, to_cluster: int, limit: str) -> None:
        """``to_cluster``: P's rank. ``limit``: what bounds the wait, in words."""
        self._verifier = verifier
        self._to_cluster = to_cluster
        self._limit = limit
        self._pending: dict[int, _Pending] = {}

    def begin(
        self, job: PullJob, deadline_s: float, on_verdict: Callable[[str], None], dialer: Dialer
    ) -> None:
        """Compare what a job has copied, before its blocks are released.

        ``on_verdict`` is told, by one of this object's methods, why the blocks are not P's, or "".
        """
        question = AskSums(
            to_cluster=self._to_cluster,
            production=job.production,
            secret=job.secret,
            number=secrets.randbits(62) | 1,
            spans=tuple(
                BlockSpan(first=group.first_position, count=len(group.dst_blocks))
                for group in job.groups
            ),
        )
        now_s = time.monotonic()
        pending = _Pending(job, question, max(deadline_s, now_s + RESEND_S), on_verdict)
        self._pending[question.number] = pending
        self._send(pending, dialer, now_s)
        own = self._verifier.own_sums(job, question.number)
        if own is None:
            self.give_up(job.request_id, ABORTED)
        else:
            pending.own = own

    def on_message(self, message: Sums | NoSums) -> None:
        """P's answer. One to an earlier question says nothing."""
        pending = self._pending.pop(message.number, None)
        if pending is None:
            return
        if isinstance(message, NoSums):
            pending.on_verdict(one_line(message.reason))
            return
        verdict = self._verifier.compare(pending.job, message.number, pending.own, message.groups)
        pending.on_verdict(verdict)

    def give_up(self, request_id: str, reason: str) -> None:
        """The request is not wanted any more; one that is not compared is no error."""
        for number, pending in list(self._pending.items()):
            if pending.job.request_id == request_id:
                del self._pending[number]
                pending.on_verdict(reason)

    def check(self, dialer: Dialer | None, now_s: float) -> None:
        """Ask again where the answer may have been lost; end what is too late."""
        for number, pending in list(self._pending.items()):
            if now_s >= pending.deadline_s:
                del self._pending[number]
                pending.on_verdict(f"P did not send its checksums {self._limit}")
            elif dialer is not None and now_s - pending.sent_s >= RESEND_S:
                self._send(pending, dialer, now_s)

    def next_event_s(self) -> float:
        """When ``check`` has something to do."""
        return min(
            (min(p.deadline_s, p.sent_s + RESEND_S) for p in self._pending.values()),
            default=math.inf,
        )

    @staticmethod
    def _send(pending: _Pending, dialer: Dialer, now_s: float) -> None:
        pending.sent_s = now_s
        dialer.send([pending.question])
