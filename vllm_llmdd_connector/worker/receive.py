"""D's worker: reservations that P's worker pushes into.

A reservation is opened in the engine before P can name it, and closed before the request is
reported, so nothing that P still has under way changes a block that vLLM may use again.

An engine without reservations lets P write the blocks directly. There P names what it will write
no more: a request is reported after P's last word about it, which each of ``Done``, ``Void``,
``Failed`` and ``CancelAck`` is, or after the link has been dropped by force.
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
    CancelAck,
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

    @property
    def has_reservations(self) -> bool: ...
    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int: ...
    def close_reservation(self, token: int) -> None: ...


class Link(Protocol):
    """What a ``Receiver`` needs of the link; ``PeerLink`` has it."""

    number: int

    def drop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Of waits for P; the words name the limit and the options that raise it."""

    cancel_timeout_s: float
    """For P's word that it writes nothing of a request any more."""
    within_cancel: str
    within_push: str
    """For all blocks of a request, once they are reserved; its time is in the job."""


@dataclass(slots=True)
class Receive:
    """One request that waits for its push."""

    job: ReceiveJob
    deadline_s: float
    """Of the last block; once the request is given up, of P's answer to that."""
    on_done: Callable[[Done], None]
    """Told P's last word: every block is there, and no push can change one any more."""
    on_failed: Callable[[str], None]
    """Told the reason: the blocks are not valid, and no push can change one any more."""
    on_reserved: Callable[[int], None] = lambda reservation: None
    """Told each reservation of the request before P can know it."""
    reservation: int = 0
    link_number: int = 0
    """Of the link over which it was reserved."""
    tokens: dict[int, int] = field(default_factory=dict)
    """The engine's, by cache."""
    given_up: str = ""
    """The reason, while P's answer is awaited."""


class Receiver:
    """All reservations of one D rank for one P rank; on the peer's thread."""

    def __init__(
        self,
        engine: ReserveEngine,
        plans: Sequence[CachePlan],
        peer_cluster_id: int,
        limits: ReceiveLimits,
        link: Link,
    ) -> None:
        """``link`` is dropped when P has found it broken, before anything is reported."""
        self._engine = engine
        self._plans = list(plans)
        self._peer = peer_cluster_id
        self._limits = limits
        self._link = link
        self._by_request: dict[str, Receive] = {}
        self._by_reservation: dict[int, Receive] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, receive: Receive, dialer: Dialer) -> None:
        """Reserve the blocks and ask for their content."""
        self._by_request[receive.job.request_id] = receive
        self._reserve(receive, dialer)

    def on_message(self, message: AnyMessage, dialer: Dialer, now_s: float) -> None:
        """An answer of P's worker. One of an earlier reservation says nothing."""
        if not isinstance(message, Done | Void | Failed | CancelAck):
            return
        receive = self._by_reservation.get(message.reservation)
        if receive is None or receive.job.transfer_id != message.transfer_id:
            return
        lost = message if isinstance(message, Failed) and message.link_lost else None
        if receive.link_number != self._link.number:
            lost = None  # the next link is made already, and carries what P has not begun
        if lost is not None:
            self._link.drop()
        match message:
            case _ if receive.given_up:
                self._fail(receive, receive.given_up)
            case Done():
                self._end(receive)
                receive.on_done(message)
            case Void():
                self._close(receive)
                self._reserve(receive, dialer)
            case Failed():
                self._fail(receive, message.reason)
        if lost is not None:
            self.give_up_all(lost.reason, dialer, now_s)

    def give_up(self, request_id: str, reason: str, dialer: Dialer | None, now_s: float) -> None:
        """The request's blocks are not wanted any more.

        Without a ``dialer`` P cannot be told: the link has been dropped.
        """
        receive = self._by_request.get(request_id)
        if receive is None:
            return
        if dialer is None:
            self._fail(receive, receive.given_up or reason)
            return
        if receive.given_up:
            return
        cancel = Cancel(
            to_cluster=self._peer,
            transfer_id=receive.job.transfer_id,
            reservation=receive.reservation,
        )
        if self._engine.has_reservations:
            self._fail(receive, reason)
        else:
            receive.given_up = reason
            receive.deadline_s = now_s + self._limits.cancel_timeout_s
        dialer.send([cancel])

    def give_up_all(self, reason: str, dialer: Dialer | None, now_s: float) -> None:
        """As ``give_up``, every request."""
        for request_id in list(self._by_request):
            self.give_up(request_id, reason, dialer, now_s)

    def check(self, dialer: Dialer | None, now_s: float) -> str:
        """End what is too late. Returns why the peer counts as lost, if it does: P may still write
        the blocks of a request that was given up, so the link has to be dropped."""
        for request_id, receive in list(self._by_request.items()):
            if now_s < receive.deadline_s:
                continue
            if receive.given_up:
                return f"P did not confirm {self._limits.within_cancel} that it has stopped"
            reason = f"P did not send all blocks {self._limits.within_push}"
            self.give_up(request_id, reason, dialer, now_s)
        return ""

    def next_event_s(self) -> float:
        """When ``check`` has something to do."""
        return min((r.deadline_s for r in self._by_request.values()), default=math.inf)

    def close(self, reason: str, now_s: float) -> None:
        """The peer is lost and the link dropped: nothing more will come."""
        self.give_up_all(reason, None, now_s)

    def _reserve(self, receive: Receive, dialer: Dialer) -> None:
        job = receive.job
        receive.reservation = secrets.randbits(62) | 1
        receive.link_number = self._link.number
        self._by_reservation[receive.reservation] = receive
        try:
            self._open(receive)
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
            link_number=self._link.number,
            blocks=(
                ()
                if self._engine.has_reservations
                else tuple(tuple(group.dst_blocks) for group in job.groups)
            ),
        )
        dialer.send([reserve])

    def _open(self, receive: Receive) -> None:
        if not self._engine.has_reservations:
            return
        for plan in self._plans:
            blocks = receive.job.groups[plan.group_index].dst_blocks
            if blocks:
                receive.tokens[plan.model_id] = self._engine.open_reservation(plan, blocks)

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
