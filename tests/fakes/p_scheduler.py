"""A P scheduler of few rules behind a real control port."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fakes.builders import make_grant, make_welcome
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import AnyMessage, Claim, Hello, Message

HOST = "127.0.0.1"


class FakePScheduler:
    """Welcomes and grants everything, and keeps what it was told.

    ``answers`` replaces the answer to messages of a type; None as an answer is silence.
    """

    def __init__(self, port: int = 0, name: str = "p-scheduler") -> None:
        self.received: list[AnyMessage] = []
        self.answers: dict[type[Message], Message | None] = {}
        self.lease_s = 30.0
        self._lock = threading.Lock()
        self._server = Server(name, HOST, port, lambda: None)
        self._server.start(self._handle)
        self.port = self._server.port

    def of_type(self, kind: type[Message]) -> list[AnyMessage]:
        with self._lock:
            return [message for message in self.received if isinstance(message, kind)]

    def close(self) -> None:
        self._server.close()

    def _handle(self, message: AnyMessage, reply: Callable[[Message], None]) -> None:
        with self._lock:
            self.received.append(message)
        answer: Message | None = None
        if type(message) in self.answers:
            answer = self.answers[type(message)]
        elif isinstance(message, Hello):
            answer = make_welcome(lease_s=self.lease_s)
        elif isinstance(message, Claim):
            answer = make_grant(message.claim_id)
        if answer is not None:
            reply(answer)
