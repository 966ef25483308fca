"""Sockets of the control plane, for real on loopback."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import zmq
from fakes.builders import make_gone
from fakes.clock import PATIENCE_S, wait_for
from fakes.threads import falls_asleep, named_thread

from vllm_llmdd_connector.control.channel import (
    Dialer,
    Server,
    ServerHandler,
    Sleeper,
    Wake,
)
from vllm_llmdd_connector.control.messages import (
    MAX_MESSAGE_BYTES,
    AnyMessage,
    Gone,
    Message,
    Renew,
    Unknown,
    encode,
)
from vllm_llmdd_connector.errors import ConfigError, LinkError

HOST = "127.0.0.1"
Reply = Callable[[Message], None]


def renew(number: int) -> Renew:
    return Renew(session=number, claim_ids=())


def echo(message: AnyMessage, reply: Reply) -> None:
    """Answer with the session's number, or fail on purpose."""
    assert isinstance(message, Renew)
    if message.session < 0:
        raise ZeroDivisionError("on purpose")
    reply(Unknown(session=message.session))


class Served:
    """A started ``Server`` and its junk count."""

    def __init__(self, handler: ServerHandler = echo, port: int = 0) -> None:
        self.num_junk = 0
        self.server = Server("test-server", HOST, port, self._count)
        self.server.start(handler)
        self.port = self.server.port

    def _count(self) -> None:
        self.num_junk += 1


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def dial(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[[int], Dialer]]:
    dialers: list[Dialer] = []

    def make(port: int) -> Dialer:
        dialers.append(Dialer(context, HOST, port))
        return dialers[-1]

    yield make
    for dialer in dialers:
        dialer.close()


def next_message(dialer: Dialer) -> AnyMessage:
    assert dialer.socket.poll(int(PATIENCE_S * 1000)), "no answer"
    messages, num_junk = dialer.receive()
    assert (len(messages), num_junk) == (1, 0)
    return messages[0]


def is_answered(dialer: Dialer, number: int) -> None:
    dialer.send([renew(number)])
    assert next_message(dialer) == Unknown(session=number)


class TestAnswers:
    def test_each_sender_gets_its_own_answer(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        first, second = dial(served.port), dial(served.port)
        first.send([renew(1)])
        second.send([renew(2)])
        assert next_message(second) == Unknown(session=2)
        assert next_message(first) == Unknown(session=1)

    def test_answer_may_come_later_from_another_thread(self, dial: Callable[[int], Dialer]) -> None:
        kept: list[Reply] = []
        served = Served(lambda message, reply: kept.append(reply))
        dialer = dial(served.port)
        dialer.send([renew(1)])
        wait_for(lambda: kept, "the message")
        kept[0](make_gone(7))
        assert next_message(dialer) == make_gone(7)
        served.server.close()

    def test_no_message_is_overlooked_while_another_thread_answers(
        self, dial: Callable[[int], Dialer]
    ) -> None:
        """Sending takes in the news of arrived messages, for which the server's thread sleeps."""
        heard: SimpleQueue[Reply] = SimpleQueue()
        served = Served(lambda message, reply: heard.put(reply))
        asked, told = dial(served.port), dial(served.port)
        told.send([renew(0)])
        tell = heard.get(timeout=PATIENCE_S)
        rounds = 300
        both = threading.Barrier(2)

        def answer() -> None:
            for _ in range(rounds):
                both.wait(PATIENCE_S)
                tell(Unknown(session=0))

        with ThreadPoolExecutor(1) as pool:
            answering = pool.submit(answer)
            for number in range(1, rounds + 1):
                asked.send([renew(number)])
                both.wait(PATIENCE_S)  # the message is about to arrive
                heard.get(timeout=PATIENCE_S)
            answering.result()
        served.server.close()

    def test_answer_after_the_server_was_closed_goes_nowhere(
        self, dial: Callable[[int], Dialer]
    ) -> None:
        """A push that ended during the shutdown ended its thread with an error, or wrote into
        whatever had got the closed pipe's number."""
        replies: list[Reply] = []
        served = Served(lambda message, reply: replies.append(reply))
        dial(served.port).send([renew(1)])
        wait_for(lambda: replies, "the message")
        served.server.close()
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        replies[0](Unknown(session=1))
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        for end in (reader, writer):
            os.close(end)

    def test_answer_to_a_sender_that_is_gone_hurts_nobody(
        self, dial: Callable[[int], Dialer]
    ) -> None:
        kept: list[Reply] = []
        served = Served(lambda message, reply: kept.append(reply))
        gone, other = dial(served.port), dial(served.port)
        gone.send([renew(1)])
        wait_for(lambda: kept, "the message")
        gone.close()
        kept[0](make_gone(1))
        other.send([renew(2)])
        wait_for(lambda: len(kept) == 2, "the second message")
        kept[1](make_gone(2))
        assert next_message(other) == make_gone(2)
        served.server.close()


class TestJunk:
    @pytest.mark.parametrize(
        "frames",
        [[b""], [b"\xc1"], [b"{}"], [b"a", b"b"], [b"", encode(renew(1))], [b"\x91" * 9999]],
        ids=["empty", "reserved byte", "text", "two frames", "delimiter", "nested"],
    )
    def test_junk_is_counted_and_the_next_message_answered(
        self, served: Served, dial: Callable[[int], Dialer], frames: list[bytes]
    ) -> None:
        dialer = dial(served.port)
        dialer.socket.send_multipart(frames)
        is_answered(dialer, 5)
        assert served.num_junk == 1

    def test_handler_error_is_counted_and_the_next_message_answered(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        dialer = dial(served.port)
        dialer.send([renew(-1)])
        is_answered(dialer, 5)
        assert served.num_junk == 1

    def test_too_large_message_costs_its_sender_the_connection_only(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        guilty, other = dial(served.port), dial(served.port)
        is_answered(other, 1)
        guilty.socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        wait_for(guilty.was_lost, "the loss of the connection")
        is_answered(other, 2)
        assert served.num_junk == 0

    def test_client_that_does_not_speak_zmq_hurts_nobody(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        with socket.create_connection((HOST, served.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            is_answered(dial(served.port), 1)
        is_answered(dial(served.port), 2)

    def test_dialer_counts_junk_beside_good_messages(
        self, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        router = context.socket(zmq.ROUTER)
        dialer = Dialer(context, HOST, router.bind_to_random_port(f"tcp://{HOST}"))
        dialer.send([renew(1)])
        sender, _ = router.recv_multipart()
        router.send_multipart([sender, b"\xc1"])
        router.send_multipart([sender, encode(make_gone(3))])
        seen: list[AnyMessage] = []
        num_junk = 0
        while not seen:
            assert dialer.socket.poll(int(PATIENCE_S * 1000))
            messages, more_junk = dialer.receive()
            seen.extend(messages)
            num_junk += more_junk
        assert (seen, num_junk) == ([make_gone(3)], 1)
        dialer.close()
        router.close(linger=0)


class TestPorts:
    def test_port_in_use_is_refused_with_port_and_holder(self, served: Served) -> None:
        with pytest.raises(ConfigError) as caught:
            Server("second", HOST, served.port, lambda: None)
        sentence = str(caught.value)
        assert f"control port {served.port} on {HOST} is in use by process {os.getpid()} (" in (
            sentence
        )
        assert "set control_port to another port" in sentence

    def test_address_of_another_machine_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: .* address of this machine"):
            Server("foreign", "192.0.2.1", 0, lambda: None)

    def test_port_is_free_again_after_close(self) -> None:
        first = Served()
        first.server.close()
        second = Served(port=first.port)
        second.server.close()
        second.server.close()

    def test_server_that_was_never_started_can_be_closed(self) -> None:
        Server("idle", HOST, 0, lambda: None).close()

    def test_impossible_address_cannot_be_dialled(
        self, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        with pytest.raises(LinkError, match=r"cannot dial 127\.0\.0\.0/8:1: "):
            Dialer(context, "127.0.0.0/8", 1)


class TestLoss:
    def test_refused_connection_is_seen(self, dial: Callable[[int], Dialer]) -> None:
        served = Served()
        served.server.close()
        wait_for(dial(served.port).was_lost, "the refusal")

    def test_closed_server_is_seen_once(self, dial: Callable[[int], Dialer]) -> None:
        served = Served()
        dialer = dial(served.port)
        is_answered(dialer, 1)
        assert not dialer.was_lost()
        served.server.close()
        wait_for(dialer.was_lost, "the loss")


class TestFlood:
    """A peer that sends more than anybody wants."""

    COUNT = 150

    @pytest.fixture
    def flooded(self, context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[tuple[Any, Dialer]]:
        """A peer, and a dialer to which it has sent ``COUNT`` messages."""
        router = context.socket(zmq.ROUTER)
        dialer = Dialer(context, HOST, router.bind_to_random_port(f"tcp://{HOST}"))
        dialer.send([renew(1)])
        sender, _ = router.recv_multipart()
        for number in range(self.COUNT):
            router.send_multipart([sender, encode(make_gone(number))])
        yield router, dialer
        dialer.close()
        router.close(linger=0)

    @staticmethod
    def numbers(messages: list[AnyMessage]) -> list[int]:
        return [message.claim_id for message in messages if isinstance(message, Gone)]

    def test_a_bounded_number_is_received_at_once_and_the_rest_wakes_the_reader(
        self, flooded: tuple[Any, Dialer]
    ) -> None:
        _, dialer = flooded
        sleeper = Sleeper()
        sleeper.watch(dialer.socket, dialer.monitor)
        seen: list[int] = []
        while len(seen) < self.COUNT:
            sleeper.sleep()
            numbers = self.numbers(dialer.receive()[0])
            assert len(numbers) <= 64
            seen += numbers
        assert seen == list(range(self.COUNT))
        sleeper.ignore(dialer.socket, dialer.monitor)
        sleeper.close()

    def test_what_was_said_before_the_loss_is_heard_first(
        self, flooded: tuple[Any, Dialer]
    ) -> None:
        router, dialer = flooded
        router.close(linger=int(PATIENCE_S * 1000))
        wait_for(lambda: dialer.monitor.poll(0), "the loss")
        seen: list[int] = []
        while True:
            seen += self.numbers(dialer.receive()[0])
            if dialer.was_lost():
                break
        assert seen == list(range(self.COUNT))


class TestSleeper:
    def test_it_wakes_for_what_it_watches_and_for_nothing_else(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        dialer, other = dial(served.port), dial(served.port)
        sleeper = Sleeper()
        sleeper.watch(dialer.socket)
        sleeper.watch(other.socket)
        sleeper.ignore(other.socket)
        other.send([renew(1)])
        wait_for(lambda: other.socket.poll(0), "the answer")
        sleeper.sleep(0)
        dialer.send([renew(2)])
        sleeper.sleep()
        assert dialer.socket.poll(0)
        sleeper.close()

    def test_wake_before_the_sleep_counts(self) -> None:
        sleeper = Sleeper()
        sleeper.wake()
        sleeper.sleep()
        sleeper.close()


class TestIdle:
    def test_server_sleeps_until_a_message_comes(
        self, served: Served, dial: Callable[[int], Dialer]
    ) -> None:
        dialer = dial(served.port)
        is_answered(dialer, 1)
        assert falls_asleep(named_thread("test-server"))
        is_answered(dialer, 2)

    def test_busy_thread_is_told_from_a_sleeping_one(self) -> None:
        """The measure itself: a thread that polls every few milliseconds does not pass."""
        stop = threading.Event()

        def poll_often() -> None:
            while not stop.wait(0.005):
                pass

        thread = threading.Thread(target=poll_often)
        thread.start()
        try:
            assert not falls_asleep(thread, attempts=3)
        finally:
            stop.set()
            thread.join()


class TestWake:
    def test_one_clear_takes_any_number_of_sets(self) -> None:
        wake = Wake()
        poller = zmq.Poller()
        poller.register(wake.fileno(), zmq.POLLIN)
        wake.clear()
        assert not poller.poll(0)
        wake.set()
        wake.set()
        assert poller.poll(0)
        wake.clear()
        wake.clear()
        assert not poller.poll(0)
        wake.close()
