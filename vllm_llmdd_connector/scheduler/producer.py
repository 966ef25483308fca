"""P's requests: from the prompt that vLLM is to compute to the release of its blocks.

Called by the scheduling thread (hooks) and by the control thread (``ProducerControl``); one lock
guards leases and handovers. Neither side waits for anything while holding it.

A lease holds its blocks by references of its own in vLLM's block pool, not by delaying the end of
the request: vLLM keeps stepping an engine whose finished requests wait, and its processes would
spin for as long as any lease lives. References are taken and given back on the scheduling thread
only; the blocks of an ended lease come back at the next hook.

A prompt that was announced for a push has its lease from the step that computes its last token on:
what vLLM does to the request afterwards touches none of its blocks.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import Grant
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.ids import new_secret
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import LeasedPrompt, SentPrompt, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import (
    Ticket,
    request_prompt_hash,
    response_params,
    transfer_id_of,
    wants_remote_decode,
)
from vllm_llmdd_connector.scheduler.block_map import final_blocks, prompt_blocks
from vllm_llmdd_connector.scheduler.handover import Gate, Handover, HandoverTable
from vllm_llmdd_connector.scheduler.lease import Lease, LeaseEnd, LeaseTable
from vllm_llmdd_connector.scheduler.prefill_steps import Prefill, PrefillSteps

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

_HANDED_OVER = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})

_NOT_LEASED = "the prefill server does not hold the blocks"

BlockTable = tuple[tuple[int, ...], ...]


class Producer:
    """The producer half of the scheduler-side connector."""

    def __init__(
        self,
        config: ConnectorConfig,
        engine_id: str,
        instance: str,
        control_port: int,
        groups: Sequence[Group],
        num_blocks: int,
        num_ranks: int,
        clock: Callable[[], float],
        stats: TransferStats,
        has_drafts: bool = False,
    ) -> None:
        """``has_drafts``: vLLM decodes speculatively, so a step writes behind its tokens."""
        self._config = config
        self._has_drafts = has_drafts
        self._engine_id = engine_id
        self._instance = instance
        self._control_port = control_port
        self._groups = tuple(groups)
        self._block_sizes = tuple(group.block_size for group in groups)
        self._max_held_blocks = int(num_blocks * config.max_leased_fraction)
        self._clock = clock
        self._stats = stats
        self.lock = threading.Lock()
        """Guards ``leases`` and ``handovers``."""
        self.leases = LeaseTable(config.lease_s, config.max_lease_s, num_ranks)
        self.handovers = HandoverTable(
            config.lease_s,
            config.first_contact_timeout_s,
            int(num_blocks * config.unreserved_fraction),
        )
        self._prefills = PrefillSteps(self._block_sizes, self._transferred)
        self._block_pool: BlockPool | None = None
        self._sent_prompts: list[SentPrompt] = []
        self._voids: list[int] = []
        self._sums = config.integrity != "off"
        self._plain: set[str] = set()
        """Requests that vLLM has not ended yet and whose prompt is not handed over."""
        self._leased: list[LeasedPrompt] = []
        self._unleased: list[int] = []

    def allow_push(self) -> None:
        """The workers' engines know reservations."""
        self.handovers.can_push = True

    def bind_block_pool(self, block_pool: "BlockPool") -> None:
        """vLLM's blocks with their reference counts; given once, before the first request.

        A lease ends on another thread, and its blocks go back with P's next request. vLLM resets
        the prefix cache of an idle P, too, and only if nobody holds a block, and tells a connector
        of it afterwards; so the pool asks first.
        """
        self._block_pool = block_pool
        reset = block_pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            self.free_ended()
            return bool(reset())

        block_pool.reset_prefix_cache = reset_prefix_cache

    @property
    def num_leases(self) -> int:
        return len(self.leases)

    @property
    def is_owed(self) -> bool:
        """Whether a D may still fetch or be sent something that P has computed."""
        return len(self.leases) > 0

    def on_new_request(self, request: "Request") -> None:
        """A D may wait for this prompt already, or will soon."""
        self.free_ended()
        params = request.kv_transfer_params
        if not wants_remote_decode(params) or getattr(request, "abort_immediately", False):
            return
        assert params is not None
        try:
            transfer_id = transfer_id_of(params)
        except RemoteProtocolError as error:
            self._compute_plainly(request.request_id, str(error))
            return
        prompt_id = request_prompt_hash(request)
        if transfer_id is None or prompt_id is None or self._block_pool is None:
            return
        with self.lock:
            handover = self.handovers.arrive(
                transfer_id,
                request.request_id,
                request.num_prompt_tokens,
                prompt_id,
                self._clock(),
            )
        if handover is None:
            self._compute_plainly(
                request.request_id, f"transfer id {transfer_id} is in use for another request"
            )
            return
        self._prefills.follow(
            request.request_id,
            transfer_id,
            request.num_prompt_tokens,
            lambda: int(request.num_preemptions),
            self._num_final(request),
        )

    def must_wait(self, request: "Request") -> bool:
        """Whether vLLM is to compute others before this prompt, because no D has blocks for it."""
        request_id = request.request_id
        if self.handovers.of_request(request_id) is None:
            return False
        num_blocks = sum(-(-request.num_prompt_tokens // size) for size in self._block_sizes)
        with self.lock:
            handover = self.handovers.of_request(request_id)
            if handover is None:
                return False
            gate = self.handovers.gate(handover, num_blocks, self._clock())
            if gate is Gate.PLAIN:
                self.handovers.end(handover, "")
        if gate is Gate.PLAIN:
            self._prefills.forget(request_id)
            self._compute_plainly(
                request_id,
                f"no D has asked for it {self._config.within('first_contact_timeout_s')}, and "
                "prompts without a D take their share of the cache (raise unreserved_fraction, or "
                "look why D does not announce it)",
            )
        return gate is Gate.WAIT

    def request_finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """Hold the prompt's blocks and return the params for D, or None.

        ``block_ids``: the request's blocks per group of vLLM, which may end the request: the lease
        has its own references.
        """
        if not wants_remote_decode(request.kv_transfer_params):
            return None
        if request.request_id in self._plain:
            self._plain.discard(request.request_id)
            return None
        prefill = self._prefills.forget(request.request_id)
        if request.status.name not in _HANDED_OVER:
            self._abandon(request.request_id, prefill)
            return None
        if self._block_pool is None:
            self._refuse_handover(
                request.request_id,
                "vLLM has not bound its block pool; does a wrapping connector forward "
                "bind_gpu_block_pool?",
            )
            return None
        self.free_ended()
        prompt_id = request_prompt_hash(request)
        if prompt_id is None:
            self._refuse_handover(
                request.request_id, "a prompt of embeddings is not handed over; D prefills itself"
            )
            return None
        blocks = prompt_blocks(
            self._transferred(block_ids), self._block_sizes, request.num_prompt_tokens
        )
        lease = None
        if prefill is None or not self._was_fetched(prefill):
            production = prefill.production if prefill is not None else 0
            lease = self._lease_of(
                request.request_id, prompt_id, blocks, production, self._num_final(request)
            )
        if prefill is not None:
            self._after_prefill(prefill, lease)
        return None if lease is None else self._params(lease, request.num_prompt_tokens)

    def _num_final(self, request: "Request") -> tuple[int, ...]:
        """Which blocks of a prompt have checksums; empty when none is wanted.

        An answer of one token ends with the step that computes the prompt. A longer one goes on in
        the last block, with asynchronous scheduling even when vLLM has ended the request already.
        """
        if not self._sums:
            return ()
        goes_on = self._has_drafts or request.max_tokens != 1
        return final_blocks(request.num_prompt_tokens, self._block_sizes, goes_on)

    def _was_fetched(self, prefill: Prefill) -> bool:
        """Whether D has everything already, and the lease has ended, before vLLM ends the
        request."""
        return prefill.is_computed and self.handovers.of_request(prefill.request_id) is None

    def _after_prefill(self, prefill: Prefill, lease: Lease | None) -> None:
        """vLLM has ended a request whose computation the workers know."""
        if lease is None and prefill.production:
            self._voids.append(prefill.production)
        if self._config.kv_digest:
            blocks = self._followed_blocks(prefill)
            sent = SentPrompt(prefill.request_id, prefill.transfer_id, blocks)
            self._sent_prompts.append(sent)

    def _lease_of(
        self,
        request_id: str,
        prompt_id: str,
        blocks: BlockTable,
        production: int,
        num_final: tuple[int, ...],
    ) -> Lease | None:
        """The lease of a computed prompt: the one it has already, or a new one.

        ``production``: what the workers know the prompt by, 0 if they do not. ``num_final`` as in
        ``LeasedPrompt``.
        """
        with self.lock:
            handover = self.handovers.of_request(request_id)
            lease = handover.lease if handover is not None else None
            is_wanted = handover is None or not handover.was_dropped
            if lease is None and is_wanted and _has_blocks(blocks):
                lease = self._open_lease(
                    request_id, prompt_id, blocks, handover, production, num_final
                )
                if lease is None:
                    self._log_over_cap(request_id)
            if handover is None or lease is None:
                if handover is not None:
                    self.handovers.end(handover, _NOT_LEASED)
                return lease
            for suitor in self.handovers.computed(handover, lease):
                grant = Grant(
                    claim_id=suitor.claim_id,
                    production=lease.production,
                    secret=lease.secret,
                    block_ids=lease.block_ids,
                )
                suitor.reply(grant)
        return lease

    def _open_lease(
        self,
        request_id: str,
        prompt_id: str,
        blocks: BlockTable,
        handover: Handover | None,
        production: int,
        num_final: tuple[int, ...],
    ) -> Lease | None:
        """Hold the blocks, unless leases hold too many already; called with the lock.

        ``production`` and ``num_final`` as for ``_lease_of``.
        """
        held_blocks = tuple(dict.fromkeys(chain.from_iterable(blocks)))
        held_blocks = tuple(block for block in held_blocks if block != NULL_BLOCK)
        needed = self.leases.num_held_blocks + self.leases.num_not_held(held_blocks)
        is_bounded = handover is not None and self.handovers.is_bounded(handover)
        if len(self.leases) and needed > self._max_held_blocks and not is_bounded:
            return None
        now_s = self._clock()
        secret = new_secret() if handover is None else handover.transfer_id
        lease = self.leases.open(
            request_id, secret, prompt_id, blocks, held_blocks, now_s, production
        )
        if handover is not None:
            handover.lease = lease
            for suitor in handover.suitors.values():
                self.leases.attach(lease, suitor.claim_id, now_s, suitor.ranks_released)
        pool = self._pool
        pool.touch([pool.blocks[block] for block in held_blocks])
        if self._sums:
            leased = LeasedPrompt(lease.production, secret, lease.block_ids, num_final)
            self._leased.append(leased)
        if self._config.kv_digest and handover is None:
            self._sent_prompts.append(SentPrompt(request_id, request_id, blocks))
        self._stats.count("leases_opened")
        return lease

    def _log_over_cap(self, request_id: str) -> None:
        self._stats.count("leases_over_cap")
        logger.warning(
            "request %s: not handed over, leases hold %d blocks and may hold %d; D prefills it "
            "itself (raise max_leased_fraction, or look why D does not fetch)",
            request_id,
            self.leases.num_held_blocks,
            self._max_held_blocks,
        )

    def _params(self, lease: Lease, num_tokens: int) -> dict[str, Any]:
        ticket = Ticket(
            host=self._config.host,
            port=self._control_port,
            instance=self._instance,
            transfer_id=lease.request_id,
            production=lease.production,
            secret=lease.secret,
            num_tokens=num_tokens,
            prompt_hash=lease.prompt_hash,
        )
        return response_params(ticket, self._engine_id, lease.block_ids)

    @property
    def _pool(self) -> "BlockPool":
        assert self._block_pool is not None, "vLLM has not bound its block pool"
        return self._block_pool

    def _transferred(self, block_ids: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        return [block_ids[group.group_id] for group in self._groups]

    def _refuse_handover(self, request_id: str, reason: str) -> None:
        self._stats.count("not_handed_over")
        logger.warning("request %s: not handed over: %s", request_id, reason)

    def _compute_plainly(self, request_id: str, reason: str) -> None:
        """As ``_refuse_handover``, before the prompt is computed."""
        self._refuse_handover(request_id, reason)
        self._plain.add(request_id)

    def _abandon(self, request_id: str, prefill: Prefill | None) -> None:
        """P's request was aborted or failed: nobody gets its blocks."""
        with self.lock:
            handover = self.handovers.of_request(request_id)
            if handover is not None:
                if handover.lease is not None:
                    self.leases.void(handover.lease)
                self.handovers.end(handover, "the request ended at the prefill server")
        if prefill is not None and prefill.production:
            self._voids.append(prefill.production)

    def free_ended(self) -> None:
        """Give the blocks of ended leases back to vLLM; scheduling thread."""
        if not len(self.leases) and not len(self.handovers):
            return
        now_s = self._clock()
        with self.lock:
            self.handovers.sweep(now_s)
            ended = self.leases.take_ended(now_s)
            for lease in ended:
                self.leases.forget(lease)
                self._end_handover(lease)
                if self._sums:
                    self._unleased.append(lease.production)
        for lease in ended:
            # The end of a prompt is worth least to others: it is to be evicted first.
            self._pool.free_blocks([self._pool.blocks[b] for b in reversed(lease.held_blocks)])
            self._log_end(lease)

    def _end_handover(self, lease: Lease) -> None:
        handover = self.handovers.of_request(lease.request_id)
        if handover is None or handover.lease is not lease:
            return
        self._voids.append(lease.production)
        handover.lease = None
        if lease.end is not LeaseEnd.VOIDED:
            expired = lease.end is LeaseEnd.EXPIRED
            self.handovers.end(handover, "the lease has expired" if expired else "")

    def fill(self, step: StepMessage, output: "SchedulerOutput") -> None:
        """Add what the workers have to push, to forget and to digest to the step message."""
        prefills = self._prefills.observe(output, self.leases.new_production)
        if prefills is not None:
            step.chunks = prefills.chunks
            for prefill, production in prefills.voided:
                self._void(prefill, production)
            for prefill in prefills.completed:
                self._hold(prefill)
        self.free_ended()
        if self._voids:
            step.voids, self._voids = self._voids, []
            # The workers apply them first, and would begin such a production anew.
            step.chunks = [c for c in step.chunks if c.production not in step.voids]
        if self._leased or self._unleased:
            step.unleased, self._unleased = self._unleased, []
            step.leased = [p for p in self._leased if p.production not in step.unleased]
            self._leased = []
        if self._sent_prompts:
            step.sent_prompts, self._sent_prompts = self._sent_prompts, []

    def _void(self, prefill: Prefill, production: int) -> None:
        """vLLM has preempted a prompt: it will be another production."""
        self._voids.append(production)
        with self.lock:
            handover = self.handovers.of_request(prefill.request_id)
            if handover is not None and handover.lease is not None:
                self.leases.void(handover.lease)
                handover.keep_releases()
                handover.lease = None

    def _hold(self, prefill: Prefill) -> None:
        """The step computes the prompt's last token: from here on a lease holds its blocks."""
        with self.lock:
            handover = self.handovers.of_request(prefill.request_id)
            if handover is None:
                return
            if not handover.was_dropped:
                blocks, prompt_id = self._followed_blocks(prefill), handover.prompt_hash
                if self._open_lease(
                    prefill.request_id,
                    prompt_id,
                    blocks,
                    handover,
                    prefill.production,
                    prefill.num_final,
                ):
                    return
            if any(group.window or group.chunk for group in self._groups):
                # vLLM uses again what a window leaves, while the workers could still send it.
                if not handover.was_dropped:
                    self._log_over_cap(prefill.request_id)
                self.handovers.end(handover, _NOT_LEASED)
                self._voids.append(prefill.production)

    def _followed_blocks(self, prefill: Prefill) -> BlockTable:
        """The prompt's blocks that computing its last token reads.

        vLLM frees a window's earlier blocks while the prompt is computed.
        """
        tables = []
        known = prefill.prompt_block_ids(self._block_sizes)
        for group, ids in zip(self._groups, known, strict=True):
            first = min(group.first_block_needed(prefill.num_tokens), len(ids))
            tables.append((NULL_BLOCK,) * first + ids[first:])
        return tuple(tables)

    def _log_end(self, lease: Lease) -> None:
        assert lease.end is not None
        self._stats.count(f"leases_{lease.end.value}")
        if lease.end is LeaseEnd.EXPIRED:
            is_oldest = lease.deadline_s >= lease.opened_s + self._config.max_lease_s
            logger.warning(
                "request %s: lease %d expired, no D has fetched and released its %d blocks %s; "
                "check that D is alive and can reach %s:%d",
                lease.request_id,
                lease.production,
                len(lease.held_blocks),
                self._config.within("max_lease_s" if is_oldest else "lease_s"),
                self._config.host,
                self._control_port,
            )


def _has_blocks(table: BlockTable) -> bool:
    """Whether anything is left of a prompt in vLLM's table; a long answer moves windows past it."""
    return any(block != NULL_BLOCK for ids in table for block in ids)
