"""P's worker: checksums of leased prompts, for a D that has pulled them.

The scheduler side says which prompts are leased, and until when. A D names a lease by its
production and secret; without a live lease nothing is read for it. Sums that were begun before a
lease ended may cover blocks that are another's by then: D counts them only with P's confirmation
that the lease lived, which it asks for afterwards.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm_llmdd_connector.control.messages import (
    NOT_HELD,
    AskSums,
    BlockSpan,
    GroupSums,
    NoSums,
    Sums,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.metadata import LeasedPrompt
from vllm_llmdd_connector.worker.checksum import Place, Policy, chosen, pack
from vllm_llmdd_connector.worker.push_plan import Reply
from vllm_llmdd_connector.worker.step_fences import StepFences
from vllm_llmdd_connector.worker.sum_thread import SumJob, SumThread

MAX_PARKED = 4096
"""Leases that were asked for before the scheduler side has named them; one beyond pushes out the
oldest."""
MAX_ENDED = 4096
"""Ended leases that are remembered, so that who comes late is told so."""
MAX_PER_LEASE = 64
"""Questions about one lease that wait for an answer."""


@dataclass(slots=True, eq=False)
class _Ask:
    """One question that is being answered."""

    message: AskSums
    reply: Reply
    counts: list[int]
    """Per KV cache group, how many blocks of the span are final."""
    positions: list[list[int]]
    """Per KV cache group, those that are summed."""
    sums: dict[Place, int] = field(default_factory=dict)
    num_left: int = 0
    """Caches that are not summed."""


@dataclass(slots=True, eq=False)
class _Held:
    """A leased prompt."""

    prompt: LeasedPrompt
    asks: dict[int, _Ask] = field(default_factory=dict)
    is_over: bool = False


class LeaseSums:
    """Of one worker rank."""

    def __init__(
        self, plans: Sequence[CachePlan], policy: Policy, thread: SumThread, cluster_id: int
    ) -> None:
        self._plans = list(plans)
        self._policy: Policy = policy
        self._thread = thread
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._held: dict[int, _Held] = {}
        self._ended: dict[int, None] = {}
        self._parked: dict[int, dict[int, tuple[AskSums, Reply]]] = {}

    # Main thread

    def update(self, leased: Iterable[LeasedPrompt], ended: Iterable[int]) -> None:
        """What has changed since the last step; before the step writes a block."""
        with self._lock:
            for production in ended:
                self._end(production)
            for prompt in leased:
                self._held[prompt.production] = _Held(prompt)
                for message, reply in self._parked.pop(prompt.production, {}).values():
                    self._answer(message, reply)

    # Control thread

    def handle(self, message: AskSums, reply: Reply) -> None:
        """Answered with ``Sums`` or ``NoSums``, now or when they are computed.

        Raises:
            RemoteProtocolError: it is meant for another process that has had this address.
        """
        if message.to_cluster != self._cluster_id:
            raise RemoteProtocolError(f"AskSums for cluster {message.to_cluster:x}")
        with self._lock:
            if message.production in self._held:
                self._answer(message, reply)
            elif message.production in self._ended:
                reply(_refusal(message, NOT_HELD))
            else:
                self._park(message, reply)

    # With the lock

    def _park(self, message: AskSums, reply: Reply) -> None:
        """D may be faster than the step that tells this rank of the lease."""
        parked = self._parked.get(message.production)
        if parked is None:
            if len(self._parked) >= MAX_PARKED:
                del self._parked[next(iter(self._parked))]
            parked = self._parked[message.production] = {}
        if len(parked) < MAX_PER_LEASE:
            parked[message.number] = message, reply

    def _answer(self, message: AskSums, reply: Reply) -> None:
        held = self._held[message.production]
        if message.number in held.asks or len(held.asks) >= MAX_PER_LEASE:
            return  # a repetition: it is being answered
        prompt = held.prompt
        if message.secret != prompt.secret:
            reply(_refusal(message, NOT_HELD))
            return
        if len(message.spans) != len(prompt.block_ids) or not all(
            _is_within(span, ids) for span, ids in zip(message.spans, prompt.block_ids, strict=True)
        ):
            reply(_refusal(message, "the prefill server does not hold all of the blocks"))
            return
        counts = [
            min(span.count, max(0, end - span.first))
            for span, end in zip(message.spans, prompt.num_final, strict=True)
        ]
        positions = [
            chosen(self._policy, message.number, span.first, count)
            for span, count in zip(message.spans, counts, strict=True)
        ]
        self._begin(held, _Ask(message, reply, counts, positions))

    def _begin(self, held: _Held, ask: _Ask) -> None:
        blocks = [
            {(group, position): ids[position] for position in positions}
            for group, (positions, ids) in enumerate(
                zip(ask.positions, held.prompt.block_ids, strict=True)
            )
        ]
        jobs = [
            SumJob(
                plan,
                blocks[plan.group_index],
                ask.sums,
                _computed(plan),
                lambda: held.is_over,
                lambda: self._summed(held, ask),
            )
            for plan in self._plans
            if blocks[plan.group_index]
        ]
        held.asks[ask.message.number] = ask
        ask.num_left = len(jobs)
        if not jobs:
            self._finish(held, ask)
        self._thread.add(jobs)

    def _finish(self, held: _Held, ask: _Ask) -> None:
        del held.asks[ask.message.number]
        groups = tuple(
            GroupSums(count=count, sums=pack(ask.sums[group, position] for position in positions))
            for group, (count, positions) in enumerate(zip(ask.counts, ask.positions, strict=True))
        )
        ask.reply(Sums(number=ask.message.number, groups=groups))

    def _end(self, production: int) -> None:
        self._ended[production] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        asked = list(self._parked.pop(production, {}).values())
        held = self._held.pop(production, None)
        if held is not None:
            held.is_over = True
            asked += [(ask.message, ask.reply) for ask in held.asks.values()]
        for message, reply in asked:
            reply(_refusal(message, NOT_HELD))

    # The sum thread

    def _summed(self, held: _Held, ask: _Ask) -> None:
        with self._lock:
            ask.num_left -= 1
            if not ask.num_left and not held.is_over:
                self._finish(held, ask)


def _is_within(span: BlockSpan, block_ids: Sequence[int]) -> bool:
    wanted = block_ids[span.first : span.first + span.count]
    return len(wanted) == span.count and NULL_BLOCK not in wanted


def _computed(plan: CachePlan) -> StepFences:
    step = StepFences(len(plan.regions))
    for region in range(len(plan.regions)):
        step.mark(region, None)
    return step


def _refusal(message: AskSums, reason: str) -> NoSums:
    return NoSums(number=message.number, reason=reason)
