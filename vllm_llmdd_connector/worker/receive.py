"""D's worker: reservations that P's worker pushes into.

A reservation is opened in the engine before P can name it, and closed before the request is
reported, so nothing that P still has under way changes a block that vLLM may use again.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    BlockSpan,
    CacheToken,
    Cancel,
    Done,
    Failed,
    Reserve,
    Void,
)
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.metadata import ReceiveJob


class ReserveEngine(Protocol):
    """What a ``Receiver`` needs of the engine; ``DataDistEngine`` has it."""

    cluster_id: int

    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int: ...
    def close_reservation(self, token: int) -> None: ...


@dataclass(slots=True)
class Receive:
    """One request that waits for its push."""

    job: ReceiveJob
    deadline_s: float
    on_done: Callable[[int], None]
    """Told P's production: every block is there, and no push can change one any more."""
    on_failed: Callable[[str], None]
    """Told the reason: the blocks are not valid, and no push can change one any more."""
    on_reserved: Callable[[int], None] = lambda reservation: None
    """Told each reservation of the request before P can know it."""
    reservation: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """The engine's, by cache."""


class Receiver:
    """All reservations of one D rank for one P rank; on the peer's thread."""

    def __init__(
        self, engine: ReserveEngine, plans: Sequence[CachePlan], peer_cluster_id: int
    ) -> None:
        self._engine = engine
        self._plans = list(plans)
        self._peer = peer_cluster_id
        self._by_request: dict[str, Receive] = {}
        self._by_reservation: dict[int, Receive] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, receive: Receive, dialer: Dialer) -> None:
        """Reserve the blocks and ask for their content."""
        self._by_request[receive.job.request_id] = receive
        self._reserve(receive, dialer)

    def on_message(self, message: AnyMessage, dialer: Dialer) -> None:
        """An answer of P's worker. One of an earlier reservation says nothing."""
        if not isinstance(message, Done | Void | Failed):
            return
        receive = self._by_reservation.get(message.reservation)
        if receive is None or receive.job.transfer_id != message.transfer_id:
            return
        match message:
            case Done():
                self._end(receive)
                receive.on_done(message.production)
            case Void():
                self._close(receive)
                self._reserve(receive, dialer)
            case Failed():
                self._fail(receive, message.reason)

    def give_up(self, request_id: str, reason: str, dialer: Dialer | None) -> None:
        """The request's blocks are not wanted any more."""
        receive = self._by_request.get(request_id)
        if receive is None:
            return
        reservation = receive.reservation
        self._fail(receive, reason)
        if dialer is not None:
            cancel = Cancel(
                to_cluster=self._peer,
                transfer_id=receive.job.transfer_id,
                reservation=reservation,
            )
            dialer.send([cancel])

    def check(self, dialer: Dialer | None, now_s: float) -> None:
        """End what is too late."""
        for request_id, receive in list(self._by_request.items()):
            if now_s >= receive.deadline_s:
                self.give_up(
                    request_id,
                    f"P did not send all blocks within {receive.job.timeout_s:.0f} s",
                    dialer,
                )

    def next_event_s(self) -> float:
        """When ``check`` has something to do."""
        return min((r.deadline_s for r in self._by_request.values()), default=math.inf)

    def close(self, reason: str) -> None:
        """The peer is lost: nothing more will come."""
        for request_id in list(self._by_request):
            self.give_up(request_id, reason, None)

    def _reserve(self, receive: Receive, dialer: Dialer) -> None:
        job = receive.job
        receive.reservation = secrets.randbits(62) | 1
        self._by_reservation[receive.reservation] = receive
        try:
            for plan in self._plans:
                blocks = job.groups[plan.group_index].dst_blocks
                if blocks:
                    token = self._engine.open_reservation(plan, blocks)
                    receive.tokens[plan.model_id] = token
        except TransferError as error:
            self._fail(receive, str(error))
            return
        receive.on_reserved(receive.reservation)
        reserve = Reserve(
            to_cluster=self._peer,
            cluster_id=self._engine.cluster_id,
            transfer_id=job.transfer_id,
            reservation=receive.reservation,
            spans=tuple(
                BlockSpan(first=group.first_position, count=len(group.dst_blocks))
                for group in job.groups
            ),
            tokens=tuple(
                CacheToken(model_id=model_id, token=token)
                for model_id, token in receive.tokens.items()
            ),
        )
        dialer.send([reserve])

    def _close(self, receive: Receive) -> None:
        for token in receive.tokens.values():
            self._engine.close_reservation(token)
        receive.tokens.clear()
        self._by_reservation.pop(receive.reservation, None)

    def _end(self, receive: Receive) -> None:
        del self._by_request[receive.job.request_id]
        self._close(receive)

    def _fail(self, receive: Receive, reason: str) -> None:
        self._end(receive)
        receive.on_failed(reason)
