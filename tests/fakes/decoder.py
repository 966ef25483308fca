"""D's scheduler side with a control plane of the test's making."""

from __future__ import annotations

from typing import Any

from fakes.builders import concurrent_params, decode_params, make_ticket
from fakes.clock import FakeClock
from fakes.control import FakeControl
from fakes.requests import make_request
from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.metadata import PullJob, StepMessage
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.scheduler.consumer import Consumer

PROMPT = list(range(40))
BLOCKS = [[21, 22, 23]]
FIRST_CONTACT_S = ConnectorConfig().first_contact_timeout_s


class Decoder:
    """A ``Consumer`` with one KV cache group of 16 tokens a block, and what surrounds it."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.control = FakeControl()
        self.stats = TransferStats()
        self.config = ConnectorConfig()
        self.consumer = Consumer(self.config, [16], self.control, clock, self.stats)

    def admit(self, request_id: str = "r", **ticket: Any) -> Any:
        request = make_request(request_id, PROMPT, decode_params(make_ticket(PROMPT, **ticket)))
        self.consumer.on_new_request(request)
        return request

    def matched(self, request_id: str = "r") -> Any:
        """A request whose claim is granted and seen."""
        request = self.admit(request_id)
        self.control.grant(self.control.last_claim)
        assert self.ask(request) == (39, True)
        return request

    def receiving(self, request_id: str = "r") -> Any:
        """A request whose pull is ordered; the order is taken."""
        request = self.matched(request_id)
        self.consumer.on_allocated(request_id, BLOCKS, 40)
        assert len(self.step().jobs) == 1
        return request

    def announced(self, request_id: str = "r", **params: Any) -> Any:
        """A request of the concurrent flow."""
        request = make_request(request_id, PROMPT, concurrent_params(**params))
        self.consumer.on_new_request(request)
        return request

    def ask(self, request: Any, num_computed_tokens: int = 0) -> tuple[int | None, bool]:
        return self.consumer.num_matched_tokens(request, num_computed_tokens)

    def step(self) -> StepMessage:
        step = StepMessage()
        self.consumer.fill(step)
        return step

    def pull(self) -> PullJob:
        (job,) = self.step().jobs
        assert isinstance(job, PullJob)
        return job

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        stats = self.stats.take()
        return ({}, {}) if stats is None else (stats.data["counts"], stats.data["failures"])
