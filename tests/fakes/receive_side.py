"""A ``Receiver`` on an engine and a channel that record."""

from __future__ import annotations

from typing import Any, cast

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import Done, Message, Reserve
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.blocks import WantedBlocks
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import ReceiveJob
from vllm_llmdd_connector.worker.receive import Receive, ReceiveLimits, Receiver

P, D = 0xA, 0xD
DEADLINE_S = 60.0
NOW_S = 7.0
LINK_NUMBER = 11
CANCEL_TIMEOUT_S = 9.0
LIMITS = ReceiveLimits(CANCEL_TIMEOUT_S, "within 9 s", "within 60 s")
PLANS = [
    CachePlan(0, 0, 100, 64, (Region("a", 0, 64, ("a",)),)),
    CachePlan(1, 0, 100, 32, (Region("b", 0, 32, ("b",)),)),
    CachePlan(2, 1, 100, 64, (Region("c", 0, 64, ("c",)),)),
]
BOTH_GROUPS = [WantedBlocks([5, 6], 1), WantedBlocks([7], 2)]


class RecordingEngine:
    """Tokens count up; ``log`` keeps the order of everything that a test looks at."""

    cluster_id = D

    def __init__(self, log: list[str], has_reservations: bool) -> None:
        self.has_reservations = has_reservations
        self._log = log
        self._last_token = 0
        self.open: dict[int, tuple[int, list[int]]] = {}
        self.fail_at = -1
        """Opening a reservation of this cache fails."""

    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int:
        if plan.model_id == self.fail_at:
            raise TransferError("no room")
        self._last_token += 1
        self.open[self._last_token] = (plan.model_id, blocks)
        return self._last_token

    def close_reservation(self, token: int) -> None:
        del self.open[token]
        self._log.append("closed")


class RecordingDialer:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, messages: list[Message]) -> None:
        self.sent.extend(messages)


class RecordingLink:
    """As ``PeerLink``: there is nothing to drop twice."""

    def __init__(self, log: list[str]) -> None:
        self.number = LINK_NUMBER
        self.is_made = True
        self._log = log

    def drop(self) -> None:
        if self.is_made:
            self.is_made = False
            self._log.append("link dropped")


class Side:
    """One ``Receiver`` and what it did."""

    def __init__(self, has_reservations: bool = True) -> None:
        self.log: list[str] = []
        self.engine = RecordingEngine(self.log, has_reservations)
        self.link = RecordingLink(self.log)
        self.receiver = Receiver(self.engine, PLANS, P, LIMITS, self.link)
        self._dialer = RecordingDialer()
        self.dialer = cast(Dialer, self._dialer)

    def begin(self, request_id: str = "r", **changes: Any) -> Reserve:
        fields = {
            "request_id": request_id,
            "transfer_id": "t",
            "claim_id": 1,
            "control_address": ("127.0.0.1", 1),
            "session": 5,
            "workers": (),
            "groups": BOTH_GROUPS,
            "loaded_blocks": [],
            "timeout_s": DEADLINE_S,
        }
        job = ReceiveJob(**{**fields, **changes})
        receive = Receive(
            job,
            DEADLINE_S,
            on_done=lambda done: self.log.append(f"done {done.production}"),
            on_failed=lambda reason: self.log.append(f"failed {reason}"),
        )
        self.receiver.begin(receive, self.dialer)
        return self.last_reserve()

    def last_reserve(self) -> Reserve:
        return [message for message in self.sent if isinstance(message, Reserve)][-1]

    @property
    def sent(self) -> list[Message]:
        return self._dialer.sent

    def hear(self, message: Any) -> None:
        self.receiver.on_message(message, self.dialer, NOW_S)

    def done(self, reserve: Reserve, **changes: Any) -> None:
        fields = {"transfer_id": "t", "reservation": reserve.reservation, "production": 7}
        self.hear(Done(**{**fields, **changes}))
