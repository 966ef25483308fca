"""D's control plane as a record of calls, with outcomes given by the test."""

from __future__ import annotations

from fakes.builders import SECRET, make_endpoint
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.control.session import Granted, InQueue, Invited, Outcome, Refused
from vllm_llmdd_connector.params import AnyTicket


class FakeControl:
    """Stands for ``ControlClient``; all that is granted is of session 5 and production 1."""

    def __init__(self) -> None:
        self.claims: dict[int, AnyTicket] = {}
        self.claim_deadlines: dict[int, float] = {}
        self.with_blocks: list[int] = []
        self.drops: list[int] = []
        self.dropped_tickets: list[AnyTicket] = []
        self.finished: list[int] = []
        self._outcomes: list[Outcome] = []

    @property
    def last_claim(self) -> int:
        return list(self.claims)[-1]

    def grant(
        self,
        claim_id: int,
        block_ids: tuple[tuple[int, ...], ...] = ((7, 8, 9),),
        workers: tuple[WorkerEndpoint, ...] | None = None,
    ) -> None:
        workers = (make_endpoint(),) if workers is None else workers
        self._outcomes.append(Granted(claim_id, 5, 1, SECRET, block_ids, workers))

    def queue(self, claim_id: int) -> None:
        self._outcomes.append(InQueue(claim_id))

    def invite(self, claim_id: int, workers: tuple[WorkerEndpoint, ...] | None = None) -> None:
        workers = (make_endpoint(),) if workers is None else workers
        self._outcomes.append(Invited(claim_id, 5, workers))

    def refuse(self, claim_id: int, stage: str = "claim", reason: str = "released") -> None:
        self._outcomes.append(Refused(claim_id, stage, reason))

    def claim(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        assert claim_id not in self.claims, "a claim was sent twice"
        self.claims[claim_id] = ticket
        self.claim_deadlines[claim_id] = deadline_s

    def has_blocks(self, claim_id: int, ticket: AnyTicket) -> None:
        assert self.claims[claim_id] == ticket
        self.with_blocks.append(claim_id)

    def drop(self, claim_id: int, ticket: AnyTicket, deadline_s: float) -> None:
        self.drops.append(claim_id)
        self.dropped_tickets.append(ticket)

    def finish(self, claim_id: int, ticket: AnyTicket) -> None:
        self.finished.append(claim_id)

    def take_outcomes(self) -> list[Outcome]:
        taken, self._outcomes = self._outcomes, []
        return taken
