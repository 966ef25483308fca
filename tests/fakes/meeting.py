"""P's scheduler side with requests that D's were told of in advance."""

from __future__ import annotations

from typing import Any

from fakes.clock import FakeClock
from fakes.prefiller import PREFILL, PROMPT, Prefiller, make_output
from fakes.requests import make_request
from vllm_llmdd_connector.control.messages import Announce, Drop, Message, Release, ReleaseAck
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.params import prompt_hash

HASH = prompt_hash(PROMPT, None, ())
BLOCKS = (4, 5, 6)


class Meeting:
    """A ``Prefiller`` whose requests have a transfer id; ``answers`` by claim."""

    def __init__(self, clock: FakeClock, can_push: bool = True, **options: Any) -> None:
        self.p = Prefiller(clock, **options)
        self.pool = self.p.pool
        if can_push:
            self.p.producer.allow_push()
        self.answers: dict[int, list[Message]] = {}

    def announce(self, claim_id: int = 1, transfer_id: str = "t", **changes: Any) -> None:
        fields = {
            "num_tokens": 40,
            "prompt_hash": HASH,
            "takes_push": True,
            "has_blocks": False,
        }
        message = Announce(
            session=self.p.welcome.session,
            claim_id=claim_id,
            transfer_id=transfer_id,
            **{**fields, **changes},
        )
        self.p.say(message, self.answers.setdefault(claim_id, []))

    def arrive(self, request_id: str = "p", transfer_id: Any = "t", **changes: Any) -> Any:
        params = {**PREFILL, "transfer_id": transfer_id}
        request = make_request(request_id, PROMPT, params, **changes)
        self.p.producer.on_new_request(request)
        return request

    def schedule(
        self, request: Any, end: int = 40, blocks: tuple[int, ...] = BLOCKS
    ) -> StepMessage:
        """vLLM allocates all blocks and computes the prompt up to ``end`` in one step."""
        assert not self.p.producer.must_wait(request)
        self.pool.allocate(blocks)
        new = {request.request_id: ([list(blocks)], 0)}
        return self.p.message(make_output(new=new, num_scheduled={request.request_id: end}))

    def go_on(self, request: Any, start: int, end: int) -> StepMessage:
        cached: dict[str, Any] = {request.request_id: (None, start)}
        return self.p.message(
            make_output(cached=cached, num_scheduled={request.request_id: end - start})
        )

    def preempt(self, request: Any, blocks: tuple[int, ...] = BLOCKS) -> StepMessage:
        self.pool.end_request(blocks)
        return self.p.message(make_output(preempted={request.request_id}))

    def finish(
        self, request: Any, status: str = "FINISHED_STOPPED", blocks: tuple[int, ...] = BLOCKS
    ) -> dict[str, Any] | None:
        request.status.name = status
        params = self.p.producer.request_finished(request, [blocks])
        self.pool.end_request(blocks)
        return params

    def release(self, claim_id: int = 1, production: int = 1, rank: int = 0) -> bool:
        message = Release(
            session=self.p.welcome.session,
            claim_id=claim_id,
            rank=rank,
            production=production,
            secret="t",
        )
        (answer,) = self.p.say(message)
        assert isinstance(answer, ReleaseAck)
        return answer.valid

    def drop(self, claim_id: int = 1) -> None:
        session = self.p.welcome.session
        self.p.say(Drop(session=session, claim_id=claim_id, production=0, secret="t"))

    def kinds(self, claim_id: int = 1) -> list[type[Message]]:
        return [type(answer) for answer in self.answers[claim_id]]

    @property
    def num_handovers(self) -> int:
        return len(self.p.producer.handovers)
