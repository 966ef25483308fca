"""P's scheduler side with vLLM around it, and D's side of the talk with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fakes.block_pool import FakeBlockPool
from fakes.builders import make_endpoint, make_fingerprint
from fakes.clock import FakeClock
from fakes.requests import make_request
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Claim,
    Drop,
    Hello,
    Message,
    Release,
    ReleaseAck,
    Renew,
    Welcome,
    raw_fingerprint,
)
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import Ticket, read_ticket
from vllm_llmdd_connector.scheduler.producer import Producer
from vllm_llmdd_connector.scheduler.producer_control import ProducerControl

PROMPT = list(range(40))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
FINGERPRINT = raw_fingerprint(make_fingerprint())
LEASE_S = ConnectorConfig().lease_s
FULL = Group(0, "FullAttentionSpec", 16, ("layer0", "layer1"))


class Prefiller:
    """A ``Producer`` of 100 blocks of 16 tokens, vLLM around it, and D's side of the talk."""

    def __init__(
        self,
        clock: FakeClock,
        num_ranks: int = 1,
        groups: tuple[Group, ...] = (FULL,),
        has_drafts: bool = False,
        **options: Any,
    ) -> None:
        self.stats = TransferStats()
        self.clock = clock
        self.pool: Any = FakeBlockPool(100)
        config = ConnectorConfig(**options)
        self.producer = Producer(
            config,
            "engine-p",
            "instance-p",
            4000,
            groups,
            100,
            num_ranks,
            clock,
            self.stats,
            has_drafts,
        )
        self.producer.bind_block_pool(self.pool)
        self.control = ProducerControl(
            config,
            "instance-p",
            self.producer,
            make_fingerprint(),
            (make_endpoint(),),
            clock,
            self.stats,
        )
        (welcome,) = self.say(Hello(version=PROTOCOL_VERSION, fingerprint=FINGERPRINT))
        assert isinstance(welcome, Welcome)
        self.welcome = welcome

    def finish(
        self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6), **changes: Any
    ) -> dict[str, Any] | None:
        """vLLM ends a request: asks, then frees the request's own references, if it may."""
        fields = {"status": "FINISHED_LENGTH_CAPPED", "params": dict(PREFILL), "prompt": PROMPT}
        request = make_request(request_id, **{**fields, **changes})
        self.pool.allocate(blocks)
        params = self.producer.request_finished(request, [blocks])
        self.pool.end_request(blocks)
        return params

    def ticket(self, request_id: str = "p", blocks: tuple[int, ...] = (4, 5, 6)) -> Ticket:
        params = self.finish(request_id, blocks)
        assert params is not None
        return read_ticket(params)

    def say(self, message: AnyMessage, answers: list[Message] | None = None) -> list[Message]:
        """As on the control thread, where vLLM's blocks must not change.

        ``answers`` also gets what is answered later.
        """
        before = self.pool.touched[:], self.pool.freed[:]
        answers = [] if answers is None else answers
        self.control.handle(message, answers.append)
        assert (self.pool.touched, self.pool.freed) == before
        return answers

    def claim(self, ticket: Ticket, claim_id: int = 1, **changes: Any) -> list[Message]:
        fields = {
            "session": self.welcome.session,
            "claim_id": claim_id,
            "production": ticket.production,
            "secret": ticket.secret,
            "prompt_hash": ticket.prompt_hash,
        }
        return self.say(Claim(**{**fields, **changes}))

    def drop(self, ticket: Ticket, claim_id: int = 1) -> list[Message]:
        return self.say(
            Drop(
                session=self.welcome.session,
                claim_id=claim_id,
                production=ticket.production,
                secret=ticket.secret,
            )
        )

    def renew(self, *claim_ids: int) -> list[Message]:
        return self.say(Renew(session=self.welcome.session, claim_ids=claim_ids))

    def release(
        self, ticket: Ticket, claim_id: int = 1, rank: int = 0, **changes: Any
    ) -> list[Message]:
        fields = {
            "session": self.welcome.session,
            "claim_id": claim_id,
            "rank": rank,
            "production": ticket.production,
            "secret": ticket.secret,
        }
        return self.say(Release(**{**fields, **changes}))

    def step(self) -> list[int]:
        """What the scheduler does in a step; returns the blocks that vLLM got back in it."""
        num_freed = len(self.pool.freed)
        self.producer.free_ended()
        freed: list[int] = self.pool.freed[num_freed:]
        return freed

    def message(self, output: Any = None) -> StepMessage:
        """The step message of ``output``, by default of a step that schedules nothing."""
        step = StepMessage()
        self.producer.fill(step, make_output() if output is None else output)
        return step

    def counts(self) -> dict[str, int]:
        stats = self.stats.take()
        return {} if stats is None else stats.data["counts"]


def make_output(
    new: dict[str, tuple[list[list[int]], int]] | None = None,
    cached: dict[str, tuple[list[list[int]] | None, int]] | None = None,
    num_scheduled: dict[str, int] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """vLLM's ``SchedulerOutput`` as far as the connector looks at it.

    ``new`` and ``cached`` are by request id: new block ids per group, tokens computed before.
    """
    cached = cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=req_id, block_ids=block_ids, num_computed_tokens=num_computed)
            for req_id, (block_ids, num_computed) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[block_ids for block_ids, _ in cached.values()],
            num_computed_tokens=[num_computed for _, num_computed in cached.values()],
        ),
        num_scheduled_tokens=num_scheduled or {},
        preempted_req_ids=preempted,
    )


def confirmed(is_held: bool, claim_id: int = 1, production: int = 1) -> list[Message]:
    return [ReleaseAck(claim_id=claim_id, production=production, valid=is_held)]
