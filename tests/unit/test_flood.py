"""One peer that says too much: it is cut short, others are answered, memory and log stay small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from fakes.clock import PATIENCE_S, wait_for

from vllm_llmdd_connector.control import gate
from vllm_llmdd_connector.control.channel import Dialer, Server
from vllm_llmdd_connector.control.gate import UNIT_BYTES, RateLimit
from vllm_llmdd_connector.control.messages import (
    MAX_RENEWED_CLAIMS,
    MAX_REQUEST_BYTES,
    AnyMessage,
    Message,
    Renew,
    Unknown,
    encode,
)

HOST = "127.0.0.1"
FLOOD = 5_000


class TestRateLimit:
    def test_burst_then_rate(self) -> None:
        limit = RateLimit(units_per_s=10, burst_units=3)
        assert [limit.allows(b"a", 0, 0.0) for _ in range(6)] == [True] * 4 + [False] * 2
        assert not limit.allows(b"a", 0, 0.09)
        assert limit.allows(b"a", 0, 0.11)

    def test_one_connection_does_not_spend_another_s(self) -> None:
        limit = RateLimit(units_per_s=1, burst_units=0)
        assert limit.allows(b"a", 10_000, 0.0)
        assert not limit.allows(b"a", 0, 1.0)
        assert limit.allows(b"b", 0, 1.0)

    def test_long_messages_and_answers_cost_more(self) -> None:
        limit = RateLimit(units_per_s=1, burst_units=10)
        assert limit.allows(b"a", 8 * UNIT_BYTES, 0.0)
        limit.charge_answer(b"a")
        limit.charge_answer(b"a")
        assert not limit.allows(b"a", 0, 0.0)
        limit.charge_answer(b"unknown")

    def test_what_was_saved_is_bounded(self) -> None:
        limit = RateLimit(units_per_s=1_000, burst_units=2)
        assert limit.allows(b"a", 0, 0.0)
        assert [limit.allows(b"a", 0, 1e6) for _ in range(4)] == [True] * 3 + [False]

    def test_connections_are_bounded_and_the_most_silent_one_is_forgotten(self) -> None:
        limit = RateLimit(units_per_s=0.001, burst_units=0, max_connections=2)
        assert limit.allows(b"loud", 9, 0.0)
        for number in range(100):
            limit.allows(b"other%d" % number, 0, 0.0)
            assert not limit.allows(b"loud", 0, 0.0)


def answer(message: AnyMessage, reply: Callable[[Message], None]) -> None:
    assert isinstance(message, Renew)
    for _ in message.claim_ids or (1,):
        reply(Unknown(session=message.session))


class Flooded:
    def __init__(self) -> None:
        self.num_junk = 0
        self.server = Server("flooded", HOST, 0, self._count)
        self.server.start(answer)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def _count(self) -> None:
        self.num_junk += 1

    def dial(self) -> Dialer:
        return Dialer(self.context, HOST, self.server.port)


@pytest.fixture
def flooded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flooded]:
    monkeypatch.setattr(RateLimit.__init__, "__defaults__", (1.0, 100.0, gate.MAX_CONNECTIONS))
    made = Flooded()
    yield made
    made.server.close()
    made.context.destroy(linger=0)


def send_until_taken(dialer: Dialer, message: Message) -> None:
    """As a flood does: without a thought for answers, but none of it is lost here."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            dialer.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            dialer.socket.poll(10, zmq.POLLOUT)
        else:
            return
    raise AssertionError("the server does not read")


def is_answered(dialer: Dialer) -> bool:
    dialer.send([Renew(session=7, claim_ids=())])
    return bool(dialer.socket.poll(int(PATIENCE_S * 1000)))


class TestServer:
    def test_flood_is_dropped_counted_and_told_once_while_others_are_answered(
        self, flooded: Flooded, caplog: pytest.LogCaptureFixture
    ) -> None:
        loud, other = flooded.dial(), flooded.dial()
        for _ in range(FLOOD):
            send_until_taken(loud, Renew(session=1, claim_ids=()))
        assert is_answered(other)
        wait_for(lambda: flooded.num_junk >= FLOOD - 200, "the drops")
        told = [r for r in caplog.records if "sends too many" in r.getMessage()]
        assert len(told) == 1
        for dialer in (loud, other):
            dialer.close()

    def test_short_messages_that_ask_for_many_answers_count_as_many(self, flooded: Flooded) -> None:
        loud = flooded.dial()
        for _ in range(20):
            send_until_taken(loud, Renew(session=1, claim_ids=tuple(range(MAX_RENEWED_CLAIMS))))
        wait_for(lambda: flooded.num_junk == 19, "the drops")
        loud.close()

    def test_oversized_message_costs_its_sender_the_connection(self, flooded: Flooded) -> None:
        guilty, other = flooded.dial(), flooded.dial()
        guilty.socket.send(bytes(MAX_REQUEST_BYTES + 1))
        wait_for(guilty.was_lost, "the loss of the connection")
        assert is_answered(other)
        for dialer in (guilty, other):
            dialer.close()


def test_a_p_that_says_too_much_does_not_hold_d_s_thread(flooded: Flooded) -> None:
    """``receive`` went on as long as there was something to read."""
    router = flooded.context.socket(zmq.ROUTER)
    port = router.bind_to_random_port(f"tcp://{HOST}")
    victim = Dialer(flooded.context, HOST, port)
    victim.send([Renew(session=1, claim_ids=())])
    identity, _ = router.recv_multipart()
    for _ in range(500):
        router.send_multipart([identity, encode(Unknown(session=1))])
    assert victim.socket.poll(int(PATIENCE_S * 1000))
    num_messages = num_dropped = 0
    while num_messages + num_dropped < 500:
        assert victim.socket.poll(int(PATIENCE_S * 1000))
        messages, num_junk = victim.receive()
        assert len(messages) + num_junk <= 64
        num_messages += len(messages)
        num_dropped += num_junk
    assert num_messages < 110
    router.close(linger=0)
    victim.close()
