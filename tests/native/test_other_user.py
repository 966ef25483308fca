"""Another user's process on this machine: it gets no link, in either direction, and no memory."""

from __future__ import annotations

import socket
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from contract.cluster import Cluster
from contract.peer import Peer
from fakes.clock import wait_for
from fakes.other_user import NOBODY, as_other_user, needs_root, open_folder

from native import wire
from native.hostile import Hostile, read_frame
from native.test_hostile_peer import FakeListener, still_serves

Attack = Callable[[], Hostile]


def test_handshakes_meet_in_private_directories_of_their_own(attack: Attack) -> None:
    folders = [Path(attack().path).parent for _ in range(2)]
    assert folders[0] != folders[1]
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@needs_root
def test_the_socket_cannot_be_reached(victim_process: Peer, attack: Attack) -> None:
    path = attack().path
    told = as_other_user(lambda: socket.socket(socket.AF_UNIX).connect(path))
    assert told.startswith("PermissionError")
    assert still_serves(victim_process, attack)


@needs_root
def test_a_caller_is_refused_by_its_user_even_if_it_reaches_the_socket(
    victim_process: Peer, attack: Attack
) -> None:
    """The directory's mode is the first lock; the kernel's word on the peer is the second."""
    hostile = attack()
    Path(hostile.path).parent.chmod(0o755)
    Path(hostile.path).chmod(0o777)

    def knock() -> str:
        hostile.link.connect(hostile.path)
        kind, _, payload = read_frame(hostile.link)
        return f"{kind} {payload!r}"

    told = as_other_user(knock)
    assert told.startswith(f"{wire.REJECT} ")
    assert f"the peer runs as user {NOBODY}" in told
    assert still_serves(victim_process, attack)


@needs_root
def test_a_listener_is_refused_by_its_user_before_it_is_told_anything(victim: Cluster) -> None:
    """It answers at the address of a true peer, and names a socket of its own."""
    with open_folder() as folder, ThreadPoolExecutor(1) as pool:
        folder.chmod(0o777)
        path = folder / "link.sock"

        def serve() -> str:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(path))
                listener.listen()
                path.chmod(0o777)
                (folder / "listens").touch()
                connection, _ = listener.accept()
                heard = b""
                while data := connection.recv(4096):
                    heard += data
                return f"heard {heard!r}"

        served = pool.submit(as_other_user, serve)
        wait_for((folder / "listens").exists, "the other user's listener")
        welcome = wire.welcome(2, str(path).encode(), remote=True)
        listener = FakeListener(wire.frame(wire.WELCOME, welcome))
        status = victim.link(2, listener.port)
        listener.close()
        assert status.name == "LLM_LINK_FAILED"
        assert f"the peer runs as user {NOBODY}" in victim.link_error(2)
        assert served.result() == "heard b''"


@needs_root
def test_memory_that_peers_of_the_same_user_may_read_is_closed_to_others(
    victim_process: Peer,
) -> None:
    memory = Path(f"/proc/{victim_process.pid}/mem")
    assert as_other_user(lambda: memory.open("rb")).startswith("PermissionError")
