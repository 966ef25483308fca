"""Bytes that are not from an engine, and floods of connections, at the listening port.

Links that exist and links that are made meanwhile must work.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket

import pytest

from contract.cluster import Cluster
from contract.fixtures import MakeLocal, MakePeer
from contract.peer import Peer

HALF_A_MESSAGE = b"LLMD\x01\x00"


@pytest.fixture
def served(make_local: MakeLocal, make_peer: MakePeer) -> tuple[Cluster, Peer, Peer]:
    """Cluster 1 here is linked to 2; cluster 3 comes later. Only 1 is attacked."""
    local, linked, late = make_local(), make_peer(2), make_peer(3)
    local.add_blocks(seed=100)
    for peer in (linked, late):
        peer.add_blocks()
    assert linked.link(1, local.port()).name == "LLM_SUCCESS"
    return local, linked, late


def serves(local: Cluster, linked: Peer, late: Peer) -> bool:
    """The old link moves data, and a new one can be made; the new one is dropped again."""
    key = local.api.BlocksCacheKey(1)
    content = local.dump(1)[0]
    for peer in (linked, late):
        if peer is late:
            status = peer.link(1, local.port()).name
            assert status == "LLM_SUCCESS", peer.link_error(1)
        peer.flip_byte(1, 0, 5 * 64)
        peer.pull_blocks(key, 1, [3], [5])
        if peer.dump(1)[0][5 * 64 : 6 * 64] != content[3 * 64 : 4 * 64]:
            return False
    return bool(late.unlink(1).name == "LLM_SUCCESS")


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" * 4096,
        os.urandom(1000),
        HALF_A_MESSAGE,
    ],
    ids=["nothing", "one byte", "http", "ones", "random", "half a message"],
)
def test_listener_goes_on(served: tuple[Cluster, Peer, Peer], data: bytes) -> None:
    for _ in range(20):
        with connect(served[0].port()) as stranger:
            stranger.sendall(data)
    assert serves(*served)


def test_ten_thousand_connections_one_after_the_other(
    served: tuple[Cluster, Peer, Peer],
) -> None:
    local, port = served[0], served[0].port()
    for count in range(10_000):
        with contextlib.suppress(ConnectionError), connect(port) as stranger:
            stranger.sendall((b"", HALF_A_MESSAGE, b"\xff" * 64)[count % 3])
    assert serves(*served)
    assert local.native_threads() < 200


@pytest.mark.parametrize("data", [b"", HALF_A_MESSAGE], ids=["silent", "half a message"])
def test_many_connections_at_once(served: tuple[Cluster, Peer, Peer], data: bytes) -> None:
    """More than the handshakes that run at once, all of them open and saying no more."""
    local, port = served[0], served[0].port()
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(700, (soft - local.descriptors()) // 3)
    assert count > 150
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stranger = stack.enter_context(connect(port))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(data)
        for _ in range(3):
            assert serves(*served)
        assert local.native_threads() < 200


def test_no_descriptors_left(served: tuple[Cluster, Peer, Peer]) -> None:
    """Old links go on without one, and new ones are made when there are some again."""
    local, linked, late = served
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        callers = [stack.enter_context(socket.socket()) for _ in range(50)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (local.descriptors() + 1, hard))
        for caller in callers:
            caller.connect(("127.0.0.1", local.port()))
        linked.pull_blocks(local.api.BlocksCacheKey(1), 1, [3], [5])
    assert serves(local, linked, late)


def test_silent_strangers_delay_nobody(served: tuple[Cluster, Peer, Peer]) -> None:
    silent = [connect(served[0].port()) for _ in range(30)]
    try:
        assert serves(*served)
    finally:
        for stranger in silent:
            stranger.close()
