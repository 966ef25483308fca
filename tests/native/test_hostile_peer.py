"""A peer that breaks the protocol loses its link; the process and its other links go on."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract.cluster import Cluster
from contract.errors import refused
from contract.peer import Peer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from native import wire
from native.hostile import Hostile, read_frame, status_in
from vllm_llmdd_connector.datadist import LLMStatusCode

Attack = Callable[[], Hostile]
PARAM_INVALID = int(LLMStatusCode.LLM_PARAM_INVALID)


def still_serves(peer: Peer, attack: Attack) -> bool:
    """A new link of the same cluster works: the old one has ended."""
    honest = attack()
    honest.complete()
    kind, _ = honest.ask(wire.RESOLVE, wire.ref(2))
    honest.close()
    return kind == wire.RESOLVED and peer.port() == peer.listen_port


class TestHandshake:
    def test_by_hand_it_works(self, victim_process: Peer, attack: Attack) -> None:
        assert still_serves(victim_process, attack)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (wire.frame(wire.HELLO, version=9), b"protocol version differs"),
            (wire.frame(wire.HELLO, size=5000), b"over the limit"),
            (wire.frame(wire.PUSH), b"unexpected message type"),
            (wire.frame(wire.HELLO, b"short"), b"ends too early"),
            (wire.frame(wire.HELLO, wire.hello(66, 9, remote=True)), b"another cluster id"),
            (wire.frame(wire.HELLO, wire.hello(66, 1, remote=False)), b"differs: local True"),
            (wire.frame(wire.HELLO, wire.hello(1, 1, remote=True)), b"both sides have"),
        ],
    )
    def test_bad_hello_gets_a_reason(
        self, victim_process: Peer, attack: Attack, data: bytes, words: bytes
    ) -> None:
        with socket.create_connection(("127.0.0.1", victim_process.listen_port)) as tcp:
            tcp.sendall(data)
            kind, _, payload = read_frame(tcp)
        assert kind == wire.REJECT
        assert words in payload
        assert still_serves(victim_process, attack)

    def test_wrong_token(self, victim_process: Peer, attack: Attack) -> None:
        hostile = attack()
        hostile.token = bytes(16)
        hostile.introduce()
        kind, _, payload = read_frame(hostile.link)
        assert kind == wire.REJECT
        assert b"another process" in payload
        assert still_serves(victim_process, attack)

    @pytest.mark.parametrize("addr", [0, 1, 2**64 - 8])
    def test_nonce_that_cannot_be_read(
        self, victim_process: Peer, attack: Attack, addr: int
    ) -> None:
        hostile = attack()
        hostile.addr = addr
        hostile.introduce()
        assert read_frame(hostile.link)[0] == wire.INTRODUCE
        kind, _, payload = read_frame(hostile.link)
        assert kind == wire.REJECT
        assert b"cannot be read" in payload
        assert still_serves(victim_process, attack)

    def test_nonce_that_is_not_there(self, victim_process: Peer, attack: Attack) -> None:
        hostile = attack()
        hostile.addr += 100
        hostile.introduce()
        assert read_frame(hostile.link)[0] == wire.INTRODUCE
        kind, _, payload = read_frame(hostile.link)
        assert kind == wire.REJECT
        assert b"is not the peer" in payload

    def test_leaving_at_any_point(self, victim_process: Peer, attack: Attack) -> None:
        attack().close()
        hostile = attack()
        hostile.introduce()
        hostile.close()
        hostile = attack()
        hostile.complete()
        hostile.close()
        assert still_serves(victim_process, attack)

    def test_message_that_never_ends_its_header(self, victim_process: Peer, attack: Attack) -> None:
        hostile = attack()
        hostile.complete()
        hostile.link.sendall(wire.frame(wire.RESOLVE, wire.ref(2))[:30])
        hostile.close()
        assert still_serves(victim_process, attack)


class TestLink:
    @pytest.mark.parametrize(
        "data",
        [
            b"\0" * 24,
            wire.frame(wire.RESOLVE, version=9),
            wire.frame(wire.RESOLVE, size=2**31),
            wire.frame(wire.RESOLVE, b"short"),
            wire.frame(wire.RESOLVE, wire.ref(9)),
            wire.frame(wire.HELLO, wire.hello(66, 1, remote=True)),
            wire.frame(999),
            wire.frame(wire.PUSH, wire.push(wire.ref(2), 64, [1], [])[:-4] + b"\xff" * 4),
        ],
    )
    def test_malformed_message_ends_the_link(
        self, victim_process: Peer, attack: Attack, data: bytes
    ) -> None:
        hostile = attack()
        hostile.complete()
        hostile.link.sendall(data)
        assert hostile.is_dropped()
        assert still_serves(victim_process, attack)

    @pytest.mark.parametrize(
        ("stride", "addrs", "runs"),
        [
            (64, 4, [(0, 16, 1)]),
            (64, 4, [(0, 15, 2)]),
            (64, 4, [(0, 0, 0)]),
            (64, 4, [(0, 2**63, 2**63)]),
            (64, 4, [(0, 2**64 - 1, 2)]),
            (64, 4, [(0, 0, 2**64 - 1)]),
            (64, 3, [(0, 0, 1)]),
            (64, 0, [(0, 0, 1)]),
            (63, 4, [(0, 0, 1)]),
            (2**64 - 1, 4, [(0, 0, 1)]),
            (64, 4, [(64, 0, 1)]),
            (64, 4, [(2**64 - 1, 0, 2)]),
        ],
    )
    def test_push_outside_the_cache_writes_nothing(
        self,
        victim_process: Peer,
        attack: Attack,
        stride: int,
        addrs: int,
        runs: list[tuple[int, int, int]],
    ) -> None:
        before = victim_process.dump(1)
        hostile = attack()
        hostile.complete()
        kind, payload = hostile.ask(
            wire.PUSH, wire.push(wire.ref(2), stride, [hostile.addr] * addrs, runs)
        )
        assert (kind, status_in(payload)) == (wire.FAILURE, PARAM_INVALID)
        assert victim_process.dump(1) == before

    @pytest.mark.parametrize(
        ("options", "status"),
        [
            ({"token": 1}, "LLM_KV_CACHE_NOT_EXIST"),
            ({"dst_addrs": (4096,) * 4}, "LLM_PARAM_INVALID"),
            ({"dst_addrs": (2**64 - 1,) * 4}, "LLM_PARAM_INVALID"),
            ({"to_blocks": False, "src_bytes": 2**64 - 1}, None),
            ({"to_blocks": False, "src_bytes": 64}, None),
            ({"dst_addrs": (4096,)}, "LLM_PARAM_INVALID"),
            ({"src_bytes": 0}, None),
        ],
    )
    def test_push_that_names_what_it_may_not(
        self,
        victim_process: Peer,
        attack: Attack,
        options: dict[str, Any],
        status: str | None,
    ) -> None:
        """Refused with a status, or (None) as a breach of the protocol."""
        before = victim_process.dump(1)
        hostile = attack()
        hostile.complete()
        push = wire.push(wire.ref(2), 64, [hostile.addr] * 4, [(0, 0, 2)], **options)
        if status is None:
            hostile.send(wire.PUSH, push, 5)
            assert hostile.is_dropped()
        else:
            kind, payload = hostile.ask(wire.PUSH, push)
            assert (kind, status_in(payload)) == (wire.FAILURE, int(LLMStatusCode[status]))
        assert victim_process.dump(1) == before

    def test_push_from_unmapped_memory_fails(self, victim_process: Peer, attack: Attack) -> None:
        hostile = attack()
        hostile.complete()
        for addr in (0, 4096, 2**64 - 64):
            kind, _ = hostile.ask(wire.PUSH, wire.push(wire.ref(2), 64, [addr] * 4, [(0, 0, 1)]))
            assert kind == wire.FAILURE
        assert still_serves(victim_process, lambda: hostile_again(hostile, attack))

    def test_answers_nobody_asked_for_are_dropped(
        self, victim_process: Peer, attack: Attack
    ) -> None:
        hostile = attack()
        hostile.complete()
        for kind in (wire.RESOLVED, wire.FINISHED, wire.PUSHED, wire.FAILURE):
            hostile.send(kind, b"anything", 12345)
        assert hostile.ask(wire.RESOLVE, wire.ref(2))[0] == wire.RESOLVED

    def test_peer_that_never_reads_its_answers(self, victim_process: Peer, attack: Attack) -> None:
        """The victim's memory stays bounded; a second link is served meanwhile."""
        hostile = attack()
        hostile.complete()
        hostile.link.settimeout(None)
        request = wire.frame(wire.RESOLVE, wire.ref(2)) * 1000
        sender = threading.Thread(target=send_until_dropped, args=(hostile.link, request))
        sender.start()
        sender.join()
        assert victim_process.port() == victim_process.listen_port

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        requests=st.lists(
            st.tuples(
                st.sampled_from([wire.RESOLVE, wire.FINISH, wire.PUSH]), st.binary(max_size=120)
            ),
            min_size=1,
            max_size=5,
        )
    )
    def test_random_requests(
        self, victim_process: Peer, attack: Attack, requests: list[tuple[int, bytes]]
    ) -> None:
        before = victim_process.dump(1)
        hostile = attack()
        hostile.complete()
        try:
            for kind, payload in requests:
                hostile.send(kind, payload, 5)
        except (BrokenPipeError, ConnectionResetError):
            pass
        hostile.close()
        assert still_serves(victim_process, attack)
        assert victim_process.dump(1) == before


def hostile_again(hostile: Hostile, attack: Attack) -> Hostile:
    hostile.close()
    return attack()


def send_until_dropped(link: socket.socket, data: bytes) -> None:
    try:
        while True:
            link.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass


class FakeListener:
    """Answers an engine's Hello with what the test wants."""

    def __init__(self, *answers: bytes) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, args=answers)
        self._thread.start()

    def _serve(self, *answers: bytes) -> None:
        connection, _ = self._server.accept()
        with connection:
            read_frame(connection)
            for answer in answers:
                connection.sendall(answer)

    def close(self) -> None:
        self._thread.join()
        self._server.close()


class TestDialling:
    """A listener that breaks the protocol; the dialling side is the victim."""

    @pytest.mark.parametrize(
        ("answer", "status", "words"),
        [
            (b"", "LLM_LINK_FAILED", "closed the connection"),
            (b"x" * 100, "LLM_LINK_FAILED", "not from an LLM-DataDist engine"),
            (wire.frame(wire.WELCOME, b"x"), "LLM_LINK_FAILED", "ends too early"),
            (wire.frame(wire.PUSH), "LLM_LINK_FAILED", "unexpected message type"),
            (wire.frame(wire.REJECT, wire.outcome(0)), "LLM_LINK_FAILED", "refused"),
            (
                wire.frame(wire.REJECT, wire.outcome(PARAM_INVALID, b"so")),
                "LLM_PARAM_INVALID",
                "so",
            ),
            (
                wire.frame(wire.WELCOME, wire.welcome(9, b"/x", remote=True)),
                "LLM_LINK_FAILED",
                "wanted 2, it is 9",
            ),
            (
                wire.frame(wire.WELCOME, wire.welcome(2, b"/x", remote=False)),
                "LLM_PARAM_INVALID",
                "local True, peer has False",
            ),
            (
                wire.frame(wire.WELCOME, wire.welcome(2, b"/no/such/path", remote=True)),
                "LLM_LINK_FAILED",
                "runs on another host",
            ),
            (
                wire.frame(wire.WELCOME, wire.welcome(2, b"p" * 500, remote=True)),
                "LLM_LINK_FAILED",
                "cannot be reached",
            ),
        ],
    )
    def test_bad_answer_is_told_in_one_sentence(
        self, victim: Cluster, answer: bytes, status: str, words: str
    ) -> None:
        listener = FakeListener(answer)
        try:
            assert victim.link(2, listener.port).name == status
        finally:
            listener.close()
        assert words in victim.link_error(2)


class TestHostileSource:
    """The victim pulls from a peer whose answers are wrong."""

    @pytest.fixture
    def linked(self, victim: Cluster) -> Iterator[Hostile]:
        victim.add_blocks(seed=1)
        hostile = Hostile(66, 1, victim.port())
        hostile.complete()
        yield hostile
        hostile.close()

    def pull(self, victim: Cluster, hostile: Hostile, *answers: tuple[int, bytes]) -> str:
        """The status a pull ends with when the peer answers like this."""

        def serve() -> None:
            for kind, payload in answers:
                _, call_id, _ = read_frame(hostile.link)
                hostile.send(kind, payload, call_id)

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(victim.api.LLMException) as caught:
            victim.pull_blocks(victim.api.BlocksCacheKey(66), 1, [0], [0])
        server.join()
        hostile.close()
        return str(caught.value.status_code.name)

    def test_malformed_answer(self, victim: Cluster, linked: Hostile) -> None:
        assert self.pull(victim, linked, (wire.RESOLVED, b"x")) == "LLM_FAILED"

    def test_answer_of_another_kind(self, victim: Cluster, linked: Hostile) -> None:
        assert self.pull(victim, linked, (wire.FINISHED, b"")) == "LLM_FAILED"

    def test_second_answer_of_another_kind(self, victim: Cluster, linked: Hostile) -> None:
        answers = (wire.RESOLVED, wire.resolved([linked.addr] * 4)), (wire.PUSHED, b"")
        assert self.pull(victim, linked, *answers) == "LLM_FAILED"

    def test_success_claimed_by_a_failure(self, victim: Cluster, linked: Hostile) -> None:
        assert self.pull(victim, linked, (wire.FAILURE, wire.outcome(0))) == "LLM_FAILED"

    def test_unknown_status(self, victim: Cluster, linked: Hostile) -> None:
        assert self.pull(victim, linked, (wire.FAILURE, wire.outcome(77))) == "LLM_FAILED"

    def test_malformed_failure(self, victim: Cluster, linked: Hostile) -> None:
        assert self.pull(victim, linked, (wire.FAILURE, b"x")) == "LLM_FAILED"

    def test_addresses_that_do_not_exist(self, victim: Cluster, linked: Hostile) -> None:
        answer = wire.resolved([2**64 - 64] * 4)
        assert self.pull(victim, linked, (wire.RESOLVED, answer)) == "LLM_FAILED"

    def test_huge_cache_is_read_only_where_it_was_asked(
        self, victim: Cluster, linked: Hostile
    ) -> None:
        answer = wire.resolved([linked.addr] * 4, rows=2**50)
        refusal = (wire.FAILURE, wire.outcome(PARAM_INVALID, b"no longer held"))
        assert self.pull(victim, linked, (wire.RESOLVED, answer), refusal) == "LLM_PARAM_INVALID"

    def test_other_number_of_tensors(self, victim: Cluster, linked: Hostile) -> None:
        answer = wire.resolved([linked.addr] * 5)
        assert self.pull(victim, linked, (wire.RESOLVED, answer)) == "LLM_PARAM_INVALID"

    def test_peer_that_leaves_in_the_middle_of_an_answer(
        self, victim: Cluster, linked: Hostile
    ) -> None:
        def serve() -> None:
            read_frame(linked.link)
            linked.link.sendall(wire.frame(wire.RESOLVED, wire.resolved([1] * 4), 1)[:40])
            linked.close()

        server = threading.Thread(target=serve)
        server.start()
        with refused(victim.api, "LLM_FAILED"):
            victim.pull_blocks(victim.api.BlocksCacheKey(66), 1, [0], [0])
        server.join()

    def test_other_links_go_on(
        self, victim: Cluster, linked: Hostile, victim_process: Peer
    ) -> None:
        linked.link.sendall(b"\xff" * 64)
        assert linked.is_dropped()
        with refused(victim.api, "LLM_FAILED") as caught:
            victim.pull_blocks(victim.api.BlocksCacheKey(66), 1, [0], [0])
        assert "not from an LLM-DataDist engine" in str(caught.value)
