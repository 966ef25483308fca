"""A ``HandoverTable`` and everything that it has answered."""

from __future__ import annotations

from typing import Any

from vllm_llmdd_connector.control.messages import Announce, Message
from vllm_llmdd_connector.scheduler.handover import Gate, Handover, HandoverTable
from vllm_llmdd_connector.scheduler.lease import Lease, LeaseTable

LEASE_S, CONTACT_S, MAX_UNRESERVED = 30.0, 5.0, 10


class Rendezvous:
    """A table and everything that it has answered, by claim."""

    def __init__(self, can_push: bool = True) -> None:
        self.table = HandoverTable(LEASE_S, CONTACT_S, MAX_UNRESERVED)
        self.table.can_push = can_push
        self.now_s = 0.0
        self.answers: dict[int, list[Message]] = {}

    def announce(
        self, claim_id: int = 1, transfer_id: str = "t", **changes: Any
    ) -> Handover | None:
        fields = {"num_tokens": 40, "prompt_hash": "h", "takes_push": True, "has_blocks": False}
        message = Announce(
            session=1, claim_id=claim_id, transfer_id=transfer_id, **{**fields, **changes}
        )
        reply = self.answers.setdefault(claim_id, []).append
        return self.table.announce(message, reply, self.now_s)

    def arrive(self, transfer_id: str = "t", request_id: str = "r") -> Handover:
        handover = self.table.arrive(transfer_id, request_id, 40, "h", self.now_s)
        assert handover is not None
        return handover

    def gate(self, handover: Handover, num_blocks: int = 3) -> Gate:
        return self.table.gate(handover, num_blocks, self.now_s)

    def admitted(
        self, transfer_id: str = "t", request_id: str = "r", num_blocks: int = 3
    ) -> Handover:
        handover = self.arrive(transfer_id, request_id)
        assert self.gate(handover, num_blocks) is Gate.GO
        return handover

    def computed(self, **changes: Any) -> Handover:
        handover = self.admitted(**changes)
        self.table.computed(handover, make_lease())
        return handover

    def kinds(self, claim_id: int = 1) -> list[type[Message]]:
        return [type(answer) for answer in self.answers[claim_id]]


def make_lease() -> Lease:
    return LeaseTable(LEASE_S, 300.0, 1).open("r", "t", "h", [[1, 2, 3]], (1, 2, 3), 0.0)
