"""P's worker as D's worker sees it: a real ROUTER that answers only when the test tells it to."""

from __future__ import annotations

from typing import TypeVar

import zmq

from fakes.clock import PATIENCE_S
from vllm_llmdd_connector.control.messages import (
    Cancel,
    CancelAck,
    CancelAll,
    Done,
    Failed,
    GroupSums,
    Message,
    Reserve,
    Void,
    decode,
    encode,
)

AMessage = TypeVar("AMessage", bound=Message)


class WorkerPeer:
    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._sender = b""

    def next(self, kind: type[AMessage]) -> AMessage:
        """Wait for the next message, which has to be of this kind."""
        assert self._socket.poll(int(PATIENCE_S * 1000)), f"no {kind.__name__} arrived"
        self._sender, frame = self._socket.recv_multipart()
        message = decode(frame)
        assert isinstance(message, kind)
        return message

    def has_message(self) -> bool:
        """Whether something waits to be read."""
        return bool(self._socket.poll(0))

    def done(self, reserve: Reserve, production: int = 9, sums: tuple[GroupSums, ...] = ()) -> None:
        self._answer(self.done_frame(reserve, production, sums))

    def done_frame(
        self, reserve: Reserve, production: int = 9, sums: tuple[GroupSums, ...] = ()
    ) -> bytes:
        return encode(
            Done(
                transfer_id=reserve.transfer_id,
                reservation=reserve.reservation,
                production=production,
                sums=sums,
            )
        )

    def say(self, message: Message) -> None:
        """To whoever was heard last."""
        self._answer(encode(message))

    def void(self, reserve: Reserve) -> None:
        void = Void(transfer_id=reserve.transfer_id, reservation=reserve.reservation)
        self._answer(encode(void))

    def failed(self, reserve: Reserve, reason: str) -> None:
        failed = Failed(
            transfer_id=reserve.transfer_id, reservation=reserve.reservation, reason=reason
        )
        self._answer(encode(failed))

    def lost_link(self, reserve: Reserve) -> None:
        """A call over the link has failed."""
        failed = Failed(
            transfer_id=reserve.transfer_id,
            reservation=reserve.reservation,
            reason="torn",
            link_lost=True,
        )
        self._answer(encode(failed))

    def quiet(self) -> None:
        """D is about to link: nothing is written of what it has reserved before."""
        self.next(CancelAll)
        self.confirm_quiet()

    def confirm_quiet(self) -> None:
        self._answer(encode(CancelAck()))

    def stopped(self, cancel: Cancel) -> None:
        """Nothing is written of this reservation."""
        ack = CancelAck(transfer_id=cancel.transfer_id, reservation=cancel.reservation)
        self._answer(encode(ack))

    def close(self) -> None:
        """Also what D sees when P's process dies; idempotent."""
        self._socket.close()
        self._context.term()

    def _answer(self, frame: bytes) -> None:
        self._socket.send_multipart([self._sender, frame])
