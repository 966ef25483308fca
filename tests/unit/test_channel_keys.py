"""The control channel with keys: who is let in, and what a recording is worth."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from fakes.builders import make_fingerprint, make_ticket
from fakes.clock import PATIENCE_S, wait_for
from fakes.threads import falls_asleep, named_thread

from vllm_llmdd_connector.control.channel import Dialer, Server
from vllm_llmdd_connector.control.client import ControlClient
from vllm_llmdd_connector.control.gate import Gatekeeper
from vllm_llmdd_connector.control.keys import KeyPair, KeySet, load_key_set, make_key_set
from vllm_llmdd_connector.control.knock import Knocker
from vllm_llmdd_connector.control.messages import AnyMessage, Knock, Renew, Unknown
from vllm_llmdd_connector.control.session import Outcome, Refused
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.errors import ConfigError

HOST = "127.0.0.1"
RENEW = Renew(session=1, claim_ids=())
MakeDialer = Callable[..., Dialer]


def new_set(folder: Path) -> KeySet:
    make_key_set(folder)
    made = load_key_set(str(folder))
    assert made is not None
    return made


@pytest.fixture
def keys(tmp_path: Path) -> KeySet:
    return new_set(tmp_path / "keys")


@pytest.fixture
def foreign(tmp_path: Path) -> KeySet:
    return new_set(tmp_path / "foreign")


@pytest.fixture
def unlisted(keys: KeySet, foreign: KeySet) -> KeySet:
    """Knows with whom it talks, and is not among those who may."""
    return KeySet(keys.listen, foreign.dial, frozenset())


class Guarded:
    """A server that answers each message, with what it heard and what it refused."""

    def __init__(self, keys: KeySet | None) -> None:
        self.heard: list[AnyMessage] = []
        self.num_junk = 0
        self.server = Server("guarded", HOST, 0, self._count, keys)
        self.server.start(self._handle)
        self.port = self.server.port

    def _handle(self, message: AnyMessage, reply: Callable[[Unknown], None]) -> None:
        self.heard.append(message)
        reply(Unknown(session=1))

    def _count(self) -> None:
        self.num_junk += 1


@pytest.fixture
def guarded(keys: KeySet) -> Iterator[Guarded]:
    made = Guarded(keys)
    yield made
    made.server.close()


@pytest.fixture
def dial() -> Iterator[MakeDialer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialers: list[Dialer] = []

    def make(port: int, keys: KeySet | None) -> Dialer:
        dialers.append(Dialer(context, HOST, port, keys))
        return dialers[-1]

    yield make
    for dialer in dialers:
        dialer.close()
    context.term()


def is_answered(dialer: Dialer) -> bool:
    dialer.send([RENEW])
    return bool(dialer.socket.poll(int(PATIENCE_S * 1000))) and dialer.receive()[0] != []


def is_refused(dialer: Dialer) -> bool:
    """Sends, and waits for the end of the connection."""
    dialer.send([RENEW])
    wait_for(dialer.was_lost, "the refusal")
    return "keys_dir of both names the same keys" in dialer.loss and dialer.receive() == ([], 0)


class TestWhoIsLetIn:
    def test_a_server_of_the_set(self, guarded: Guarded, dial: MakeDialer, keys: KeySet) -> None:
        assert is_answered(dial(guarded.port, keys))
        assert (guarded.heard, guarded.num_junk) == ([RENEW], 0)

    def test_nobody_with_a_foreign_set(
        self, guarded: Guarded, dial: MakeDialer, foreign: KeySet, keys: KeySet
    ) -> None:
        assert is_refused(dial(guarded.port, foreign))
        assert is_answered(dial(guarded.port, keys))
        assert guarded.heard == [RENEW]
        wait_for(lambda: guarded.num_junk, "the count of the refusal")

    def test_nobody_without_a_key(self, guarded: Guarded, dial: MakeDialer, keys: KeySet) -> None:
        assert is_refused(dial(guarded.port, None))
        assert is_answered(dial(guarded.port, keys))
        assert guarded.heard == [RENEW]

    def test_no_key_that_is_not_in_the_set(
        self, guarded: Guarded, dial: MakeDialer, unlisted: KeySet, keys: KeySet
    ) -> None:
        assert is_refused(dial(guarded.port, unlisted))
        assert is_answered(dial(guarded.port, keys))
        assert guarded.heard == [RENEW]

    def test_nobody_while_there_is_nobody_to_ask(
        self, dial: MakeDialer, keys: KeySet, unlisted: KeySet
    ) -> None:
        """ZeroMQ let everybody in then; a server that closes stops asking before it has closed its
        port."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        guarded = context.socket(zmq.ROUTER)
        gatekeeper = Gatekeeper(context, guarded, keys)
        port = guarded.bind_to_random_port(f"tcp://{HOST}")
        gatekeeper.close()
        dialer = dial(port, unlisted)
        dialer.send([RENEW])
        wait_for(dialer.was_lost, "the refusal")
        assert not guarded.poll(0)
        guarded.close()
        context.term()

    def test_a_key_that_was_added_to_the_set(
        self, dial: MakeDialer, keys: KeySet, unlisted: KeySet
    ) -> None:
        wider = KeySet(keys.listen, keys.dial, keys.accepted | {unlisted.dial.public})
        guarded = Guarded(wider)
        assert is_answered(dial(guarded.port, unlisted))
        guarded.server.close()

    def test_a_server_of_another_set_is_told_nothing(
        self, guarded: Guarded, dial: MakeDialer, keys: KeySet, foreign: KeySet
    ) -> None:
        """It stands at the address that a request names, and has not the set's key."""
        impostor = Guarded(KeySet(foreign.listen, foreign.dial, keys.accepted))
        assert is_refused(dial(impostor.port, keys))
        assert impostor.heard == []
        impostor.server.close()

    def test_a_server_without_keys_is_told_nothing(self, dial: MakeDialer, keys: KeySet) -> None:
        impostor = Guarded(None)
        assert is_refused(dial(impostor.port, keys))
        assert impostor.heard == []
        impostor.server.close()

    def test_knowing_the_public_keys_alone_does_not_help(
        self, guarded: Guarded, dial: MakeDialer, keys: KeySet, foreign: KeySet
    ) -> None:
        mixed = KeyPair(keys.dial.public, foreign.dial.secret)
        assert is_refused(dial(guarded.port, KeySet(keys.listen, mixed, frozenset())))
        assert guarded.heard == []


class TestStrangers:
    @pytest.mark.parametrize("data", [b"", b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n"])
    def test_other_protocols_and_silence_hurt_nobody(
        self, guarded: Guarded, dial: MakeDialer, keys: KeySet, data: bytes
    ) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stranger = stack.enter_context(socket.create_connection((HOST, guarded.port)))
                stranger.sendall(data)
            assert is_answered(dial(guarded.port, keys))

    def test_the_server_sleeps_when_nothing_comes(
        self, guarded: Guarded, dial: MakeDialer, keys: KeySet
    ) -> None:
        assert is_answered(dial(guarded.port, keys))
        assert falls_asleep(named_thread("guarded"))

    def test_refusals_are_logged_once(
        self,
        guarded: Guarded,
        dial: MakeDialer,
        unlisted: KeySet,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for number in range(5):
            assert is_refused(dial(guarded.port, unlisted))
            wait_for(lambda number=number: guarded.num_junk > number, "the count")
        assert len([r for r in caplog.records if "without a key" in r.getMessage()]) == 1


class Recorder:
    """Hands bytes on between a dialer and a server, and keeps what the dialer sent."""

    def __init__(self, port: int) -> None:
        self.sent = b""
        self._listener = socket.create_server((HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._server = socket.create_connection((HOST, port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._client, _ = self._listener.accept()
        threading.Thread(target=self._answers, daemon=True).start()
        with contextlib.suppress(OSError):
            while data := self._client.recv(65536):
                self.sent += data
                self._server.sendall(data)

    def _answers(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(65536):
                self._client.sendall(data)

    def close(self) -> None:
        for end in (self._client, self._server):
            # Wakes the threads, which a close alone does not.
            end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._listener.close()


class TestReplay:
    def test_recorded_connection_says_nothing_when_it_is_played_again(
        self, guarded: Guarded, dial: MakeDialer, keys: KeySet
    ) -> None:
        recorder = Recorder(guarded.port)
        assert is_answered(dial(recorder.port, keys))
        assert b"Renew" not in recorder.sent, "it can be read on the way"
        recorder.close()
        with socket.create_connection((HOST, guarded.port)) as again:
            again.settimeout(PATIENCE_S)
            again.sendall(recorder.sent)
            with contextlib.suppress(ConnectionError):
                while again.recv(4096):
                    pass
        assert is_answered(dial(guarded.port, keys))
        assert guarded.heard == [RENEW, RENEW], "one by each dialer"


def test_port_in_use_leaves_nothing_behind(guarded: Guarded, keys: KeySet) -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"control port {guarded.port} .* is in use"):
            Server("second", HOST, guarded.port, lambda: None, keys)


class TestBothSides:
    def test_claim_at_a_p_of_another_set_is_refused_with_the_cause(
        self, guarded: Guarded, foreign: KeySet
    ) -> None:
        client = ControlClient(
            make_fingerprint(), time.monotonic, lambda n: None, True, Deadlines(), foreign
        )
        client.claim(1, make_ticket(host=HOST, port=guarded.port), time.monotonic() + 60)
        outcomes: list[Outcome] = []
        wait_for(lambda: outcomes.extend(client.take_outcomes()) or outcomes, "the outcome")
        (refused,) = outcomes
        assert isinstance(refused, Refused)
        assert refused.stage == "connection"
        assert "ended in its handshake" in refused.reason
        client.close()

    def test_knock_with_keys_is_heard(self, guarded: Guarded, keys: KeySet) -> None:
        knocker, message = Knocker(keys), Knock(transfer_id="t", host=HOST, port=1)
        knocker.knock((HOST, guarded.port), message, lambda: None)
        wait_for(lambda: guarded.heard == [message], "the knock")
        knocker.close()

    def test_knock_at_a_d_of_another_set_is_reported(
        self, guarded: Guarded, foreign: KeySet
    ) -> None:
        knocker, message = Knocker(foreign), Knock(transfer_id="t", host=HOST, port=1)
        failed: list[str] = []
        knocker.knock((HOST, guarded.port), message, lambda: failed.append("t"))
        wait_for(lambda: failed == ["t"], "the report")
        assert guarded.heard == []
        knocker.close()
