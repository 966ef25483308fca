"""One request at D that came with a ticket, and how long it may wait before it has blocks.

Scheduling thread only; ``Consumer`` owns it.
"""

from dataclasses import dataclass

from vllm_llmdd_connector.control.session import Granted, Invited
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.params import AnyTicket, Appointment
from vllm_llmdd_connector.scheduler.request_state import REQUEST, RequestEvent, RequestState
from vllm_llmdd_connector.states import next_state

UNANSWERED = frozenset({RequestState.SUMMONING, RequestState.CLAIMING})
OPEN = UNANSWERED | {RequestState.MATCHED}
"""Nothing has been decided about the request's blocks yet."""
_RESERVE = "reserve_timeout_s"


@dataclass(slots=True)
class ConsumerRequest:
    """What D's scheduler side knows of a request, from its ticket to the order for its blocks."""

    request_id: str
    ticket: AnyTicket
    claim_id: int
    state: RequestState
    deadline_s: float = 0.0
    """Of what comes next: a P's knock, the answer to the claim, or the reservation of blocks."""
    limit: str = ""
    """The option that ``deadline_s`` comes from."""
    offer: Granted | Invited | None = None
    num_local_tokens: int = 0
    """D's local prefix hit when vLLM last asked."""

    def on(self, event: RequestEvent) -> None:
        self.state = next_state(REQUEST, self.state, event)

    def wait(self, limit: str, deadlines: Deadlines, now_s: float) -> None:
        """The next thing is expected for as long as the option ``limit`` says."""
        self.limit = limit
        self.deadline_s = now_s + getattr(deadlines, limit)

    def wait_for_reservation(self, deadlines: Deadlines, now_s: float) -> None:
        """P has the request: one limit for its turn there and for D's own blocks. P says so again
        for each announcement that it gets, which prolongs nothing."""
        if self.limit != _RESERVE:
            self.wait(_RESERVE, deadlines, now_s)

    def is_late(self, now_s: float) -> bool:
        """Whether it has waited too long for an answer or for the reservation of its blocks.

        What P has granted it holds by a limit of its own.
        """
        is_invited = self.state is RequestState.MATCHED and isinstance(self.offer, Invited)
        return (self.state in UNANSWERED or is_invited) and now_s >= self.deadline_s

    def lateness(self, deadlines: Deadlines) -> tuple[str, str]:
        """Stage and reason of a request that is late."""
        within = deadlines.within(self.limit)
        if self.limit != _RESERVE:
            return self.stage, f"P did not answer {within}"
        if self.offer is None:
            return "reserve", f"its turn at P did not come {within}"
        return "reserve", f"its turn at P and free blocks here did not come {within}"

    @property
    def stage(self) -> str:
        """Where a request fails that P has made no offer yet."""
        if self.state is RequestState.SUMMONING:
            return "metaserver"
        return "announce" if isinstance(self.ticket, Appointment) else "claim"
