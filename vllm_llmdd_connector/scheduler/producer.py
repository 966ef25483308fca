"""P's requests: from a finished prefill to the release of its blocks.

Called by the scheduling thread (hooks) and by the control thread (``handle``); one lock guards the
lease table. Neither side waits for anything while holding it.

A lease holds its blocks by references of its own in vLLM's block pool, not by delaying the end of
the request: vLLM keeps stepping an engine whose finished requests wait, and its processes would
spin for as long as any lease lives. References are taken and given back on the scheduling thread
only; the blocks of an ended lease come back at the next hook.
"""

import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.fingerprint import Fingerprint, first_difference
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Drop,
    Gone,
    Grant,
    Hello,
    Message,
    Reject,
    Release,
    ReleaseAck,
    Renew,
    Unknown,
    Welcome,
    WorkerEndpoint,
    read_fingerprint,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.ids import new_claim_id, new_secret
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import SentPrompt, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import (
    Ticket,
    request_prompt_hash,
    response_params,
    wants_remote_decode,
)
from vllm_llmdd_connector.scheduler.block_map import NULL_BLOCK, prompt_blocks
from vllm_llmdd_connector.scheduler.lease import Lease, LeaseEnd, LeaseTable

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

logger = get_logger(__name__)

MAX_LOGGED = 1024
"""Kinds of refusals that are logged, each once; all are counted."""

_HANDED_OVER = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})


class Producer:
    """The producer half of the scheduler-side connector."""

    def __init__(
        self,
        config: ConnectorConfig,
        engine_id: str,
        instance: str,
        control_port: int,
        block_sizes: Sequence[int],
        num_blocks: int,
        num_ranks: int,
        clock: Callable[[], float],
        stats: TransferStats,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._instance = instance
        self._control_port = control_port
        self._block_sizes = tuple(block_sizes)
        self._max_held_blocks = int(num_blocks * config.max_leased_fraction)
        self._clock = clock
        self._stats = stats
        self._session = new_claim_id()
        self._lock = threading.Lock()
        self._leases = LeaseTable(config.lease_s, config.max_lease_s, num_ranks)
        self._block_pool: BlockPool | None = None
        self._sent_prompts: list[SentPrompt] = []
        self._fingerprint: Fingerprint | None = None
        self._logged_refusals: set[str] = set()
        self._workers: tuple[WorkerEndpoint, ...] = ()

    def set_identity(self, fingerprint: Fingerprint, workers: tuple[WorkerEndpoint, ...]) -> None:
        """What Welcome says; called before the control channel answers."""
        self._fingerprint = fingerprint
        self._workers = workers

    def bind_block_pool(self, block_pool: "BlockPool") -> None:
        """vLLM's blocks with their reference counts; given once, before the first request."""
        self._block_pool = block_pool

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def request_finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the prompt's blocks and return the params for D, or (False, None).

        The first value is always False: vLLM may end the request, the lease has its own references.
        """
        if not wants_remote_decode(request.kv_transfer_params):
            return False, None
        if request.status.name not in _HANDED_OVER:
            return False, None
        if self._block_pool is None:
            self._stats.count("not_handed_over")
            logger.warning(
                "request %s: not handed over, vLLM has not bound its block pool; does a wrapping "
                "connector forward bind_gpu_block_pool?",
                request.request_id,
            )
            return False, None
        self.free_ended()
        prompt_id = request_prompt_hash(request)
        if prompt_id is None:
            self._stats.count("not_handed_over")
            logger.warning(
                "request %s: a prompt of embeddings is not handed over; D prefills it itself",
                request.request_id,
            )
            return False, None
        blocks = prompt_blocks(block_ids, self._block_sizes, request.num_prompt_tokens)
        held_blocks = tuple(dict.fromkeys(chain.from_iterable(blocks)))
        held_blocks = tuple(block for block in held_blocks if block != NULL_BLOCK)
        if not held_blocks:
            return False, None
        with self._lock:
            lease = self._open_lease(request.request_id, prompt_id, blocks, held_blocks)
        if lease is None:
            return False, None
        return False, self._params(lease, request.num_prompt_tokens)

    def _open_lease(
        self,
        request_id: str,
        prompt_id: str,
        blocks: tuple[tuple[int, ...], ...],
        held_blocks: tuple[int, ...],
    ) -> Lease | None:
        held = self._leases.num_held_blocks
        needed = held + self._leases.num_not_held(held_blocks)
        if len(self._leases) and needed > self._max_held_blocks:
            self._stats.count("leases_over_cap")
            logger.warning(
                "request %s: not handed over, leases hold %d blocks and may hold %d; D prefills it "
                "itself (raise max_leased_fraction, or look why D does not fetch)",
                request_id,
                held,
                self._max_held_blocks,
            )
            return None
        lease = self._leases.open(
            request_id, new_secret(), prompt_id, blocks, held_blocks, self._clock()
        )
        pool = self._pool
        pool.touch([pool.blocks[block] for block in held_blocks])
        if self._config.kv_digest:
            self._sent_prompts.append(SentPrompt(request_id, blocks))
        self._stats.count("leases_opened")
        return lease

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

    def free_ended(self) -> None:
        """Give the blocks of ended leases back to vLLM; scheduling thread."""
        if not len(self._leases):
            return
        with self._lock:
            ended = self._leases.take_ended(self._clock())
            for lease in ended:
                self._leases.forget(lease)
        for lease in ended:
            # The end of a prompt is worth least to others: it is to be evicted first.
            self._pool.free_blocks([self._pool.blocks[b] for b in reversed(lease.held_blocks)])
            self._log_end(lease)

    def fill(self, step: StepMessage) -> None:
        """Add what the workers have to digest to the step message."""
        if self._sent_prompts:
            step.sent_prompts, self._sent_prompts = self._sent_prompts, []

    def _log_end(self, lease: Lease) -> None:
        assert lease.end is not None
        self._stats.count(f"leases_{lease.end.value}")
        if lease.end is LeaseEnd.EXPIRED:
            logger.warning(
                "request %s: lease %d expired, no D has fetched and released its %d blocks; "
                "check that D is alive and can reach %s:%d",
                lease.request_id,
                lease.production,
                len(lease.held_blocks),
                self._config.host,
                self._control_port,
            )

    def handle(self, message: AnyMessage, reply: Callable[[Message], None]) -> None:
        """Answer one message of a D scheduler; control thread."""
        match message:
            case Hello():
                reply(self._on_hello(message))
            case (
                Claim(session=session)
                | Renew(session=session)
                | Drop(session=session)
                | Release(session=session)
            ):
                if session != self._session:
                    reply(Unknown(session=session))
                else:
                    self._on_session_message(message, reply)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} is not for a prefill server")

    def _on_hello(self, message: Hello) -> Message:
        assert self._fingerprint is not None
        problem: str | None
        if message.version != PROTOCOL_VERSION:
            problem = (
                f"protocol version differs: prefill server {PROTOCOL_VERSION}, decode server "
                f"{message.version}; install one version of the connector on both"
            )
        else:
            problem = first_difference(self._fingerprint, read_fingerprint(message.fingerprint))
            if problem is not None:
                problem = (
                    f"{problem} (local is the prefill server, peer the decode server); start both "
                    "with the same model and KV cache options"
                )
        if problem is None:
            return Welcome(
                session=self._session,
                instance=self._instance,
                workers=self._workers,
                lease_s=self._config.lease_s,
            )
        self._stats.count_failure("handshake")
        if problem not in self._logged_refusals and len(self._logged_refusals) < MAX_LOGGED:
            self._logged_refusals.add(problem)
            logger.error("a decode server was refused: %s", problem)
        return Reject(reason=problem)

    def _on_session_message(
        self, message: Claim | Renew | Drop | Release, reply: Callable[[Message], None]
    ) -> None:
        now_s = self._clock()
        with self._lock:
            match message:
                case Claim():
                    reply(self._claimed(message, now_s))
                case Renew():
                    for claim_id in message.claim_ids:
                        if not self._leases.renew(claim_id, now_s):
                            reply(Gone(claim_id=claim_id, reason="the lease has ended"))
                case Drop():
                    self._leases.drop(message.production, message.secret, message.claim_id)
                case Release():
                    reply(self._released(message))

    def _claimed(self, message: Claim, now_s: float) -> Message:
        result = self._leases.claim(
            message.production, message.secret, message.prompt_hash, message.claim_id, now_s
        )
        if isinstance(result, str):
            return Gone(claim_id=message.claim_id, reason=result)
        return Grant(claim_id=message.claim_id, block_ids=result.block_ids)

    def _released(self, message: Release) -> Message:
        is_held = self._leases.release(
            message.production, message.secret, message.claim_id, message.rank
        )
        return ReleaseAck(claim_id=message.claim_id, production=message.production, valid=is_held)
