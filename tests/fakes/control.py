"""D's control plane as a record of calls, with outcomes given by the test."""

from __future__ import annotations

from fakes.builders import make_endpoint
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.control.session import Granted, Outcome, Refused
from vllm_llmdd_connector.params import Ticket


class FakeControl:
    """Stands for ``ControlClient``; all that is granted is of session 5."""

    def __init__(self) -> None:
        self.claims: dict[int, Ticket] = {}
        self.claim_deadlines: dict[int, float] = {}
        self.drops: list[int] = []
        self.dropped_tickets: list[Ticket] = []
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
        self._outcomes.append(Granted(claim_id, 5, block_ids, workers))

    def refuse(self, claim_id: int, stage: str = "claim", reason: str = "released") -> None:
        self._outcomes.append(Refused(claim_id, stage, reason))

    def claim(self, claim_id: int, ticket: Ticket, deadline_s: float) -> None:
        assert claim_id not in self.claims, "a claim was sent twice"
        self.claims[claim_id] = ticket
        self.claim_deadlines[claim_id] = deadline_s

    def drop(self, claim_id: int, ticket: Ticket, deadline_s: float) -> None:
        self.drops.append(claim_id)
        self.dropped_tickets.append(ticket)

    def finish(self, claim_id: int, ticket: Ticket) -> None:
        self.finished.append(claim_id)

    def take_outcomes(self) -> list[Outcome]:
        taken, self._outcomes = self._outcomes, []
        return taken
