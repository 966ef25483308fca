"""Offers of shared memory that no honest peer makes: the link ends, the process goes on."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract.errors import wait_until
from contract.peer import Peer

from native import wire
from native.hostile import Hostile, read_frame

Attack = Callable[[], Hostile]
Range = tuple[int, int, int]

PAGE = 4096
SIZE = 16 * PAGE
F_SEAL_FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
WHOLE: list[Range] = [(PAGE, SIZE, 0)]
FAR = 1 << 40


def memfd(size: int = SIZE, *, seals: int = SEALS, is_full: bool = True) -> int:
    fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if is_full:
        os.posix_fallocate(fd, 0, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def linked(attack: Attack) -> Hostile:
    hostile = attack()
    hostile.complete()
    return hostile


@pytest.fixture
def fds() -> Iterator[list[int]]:
    """Descriptors that are closed at the end."""
    made: list[int] = []
    yield made
    for fd in made:
        os.close(fd)


def still_serves(attack: Attack) -> bool:
    hostile = attack()
    hostile.complete()
    kind, _ = hostile.ask(wire.RESOLVE, wire.ref(2))
    return kind == wire.RESOLVED


def is_answered(hostile: Hostile) -> bool:
    return hostile.ask(wire.RESOLVE, wire.ref(2))[0] == wire.RESOLVED


def test_an_honest_offer_is_mapped_until_it_is_withdrawn(
    victim_process: Peer, linked: Hostile, fds: list[int]
) -> None:
    fds.append(memfd())
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, WHOLE), fds)
    assert is_answered(linked)
    assert "hostile" in victim_process.mapped_names()
    linked.send(wire.WITHDRAW, wire.withdraw(1))
    linked.send(wire.WITHDRAW, wire.withdraw(7))
    assert is_answered(linked)
    assert "hostile" not in victim_process.mapped_names()


def test_mappings_go_with_the_link(victim_process: Peer, linked: Hostile, fds: list[int]) -> None:
    fds.append(memfd())
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, WHOLE), fds)
    assert is_answered(linked)
    linked.close()
    victim_process.unlink(66, force=True)
    assert "hostile" not in victim_process.mapped_names()


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (SIZE, {"seals": 0}),
        (SIZE, {"seals": fcntl.F_SEAL_SHRINK}),
        (SIZE, {"seals": F_SEAL_FUTURE_WRITE}),
        (SIZE, {"is_full": False}),
        (SIZE - PAGE, {}),
        (SIZE + PAGE, {}),
    ],
)
def test_file_that_could_hurt(
    attack: Attack, linked: Hostile, fds: list[int], size: int, options: dict[str, int]
) -> None:
    fds.append(memfd(size, **options))
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, WHOLE), fds)
    assert linked.is_dropped()
    assert still_serves(attack)


def test_file_on_disk(attack: Attack, linked: Hostile, fds: list[int], tmp_path: Path) -> None:
    fds.append(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT))
    os.posix_fallocate(fds[0], 0, SIZE)
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, WHOLE), fds)
    assert linked.is_dropped()
    assert still_serves(attack)


def test_descriptor_that_is_no_file(attack: Attack, linked: Hostile, fds: list[int]) -> None:
    fds.extend(os.pipe())
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, WHOLE), fds[:1])
    assert linked.is_dropped()
    assert still_serves(attack)


def test_no_descriptor_leaves_the_memory_out(victim_process: Peer, linked: Hostile) -> None:
    """As when the receiver has none left."""
    linked.send(wire.SHARE, wire.share(1, SIZE, WHOLE))
    assert is_answered(linked)
    assert "hostile" not in victim_process.mapped_names()


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [(PAGE + 1, SIZE, 0)],
        [(PAGE, SIZE - 1, 0)],
        [(PAGE, SIZE, PAGE)],
        [(PAGE, SIZE - PAGE, 0)],
        [(PAGE, SIZE + PAGE, 0)],
        [(PAGE, 0, 0), (PAGE, SIZE, 0)],
        [(2**64 - PAGE, SIZE, 0)],
        [(PAGE, 2**64 - PAGE, 0)],
        [(PAGE, SIZE // 2, 0), (PAGE, SIZE // 2, SIZE // 2)],
        [(PAGE, SIZE // 2, 0), (2 * PAGE, SIZE // 2, SIZE // 2)],
        [(FAR, SIZE // 2, SIZE // 2), (PAGE, SIZE // 2, 0)],
    ],
)
def test_impossible_ranges(
    attack: Attack, linked: Hostile, fds: list[int], ranges: list[Range]
) -> None:
    fds.append(memfd())
    linked.send_with_fds(wire.SHARE, wire.share(1, SIZE, ranges), fds)
    assert linked.is_dropped()
    assert still_serves(attack)


@pytest.mark.parametrize(("file_id", "addr"), [(1, FAR), (2, PAGE), (2, SIZE)])
def test_second_file_over_the_first(
    attack: Attack, linked: Hostile, fds: list[int], file_id: int, addr: int
) -> None:
    for number, start in ((1, PAGE), (file_id, addr)):
        fds.append(memfd())
        payload = wire.share(number, SIZE, [(start, SIZE, 0)])
        linked.send_with_fds(wire.SHARE, payload, fds[-1:])
    assert linked.is_dropped()
    assert still_serves(attack)


def test_too_many_files(attack: Attack, linked: Hostile) -> None:
    try:
        for number in range(4097):
            payload = wire.share(number, PAGE, [(FAR + number * PAGE, PAGE, 0)])
            linked.send(wire.SHARE, payload)
    except OSError:
        pass  # the link has ended before the last one
    assert linked.is_dropped()
    assert still_serves(attack)


def test_descriptors_without_a_message(
    victim_process: Peer, attack: Attack, linked: Hostile, fds: list[int]
) -> None:
    before = victim_process.descriptors()
    fds.extend(memfd() for _ in range(8))
    try:
        for _ in range(20):
            linked.send_with_fds(wire.RESOLVE, wire.ref(2), fds)
            read_frame(linked.link)
    except (OSError, EOFError):
        pass
    assert linked.is_dropped()
    assert still_serves(attack)
    wait_until(lambda: victim_process.descriptors() <= before + 4)


def test_malformed_offers(attack: Attack) -> None:
    for kind, payload in [
        (wire.SHARE, b"short"),
        (wire.SHARE, wire.share(1, SIZE, WHOLE) + b"more"),
        (wire.SHARE, wire.share(1, SIZE, WHOLE)[:-1]),
        (wire.WITHDRAW, b"short"),
        (wire.WITHDRAW, wire.withdraw(1) + b"more"),
    ]:
        hostile = attack()
        hostile.complete()
        hostile.send(kind, payload)
        assert hostile.is_dropped()
    assert still_serves(attack)


def test_offer_to_a_side_that_did_not_ask(attack: Attack) -> None:
    """A side whose transport is cma takes no memory."""
    peer = Peer()
    try:
        peer.create(1, transport="cma")
        hostile = Hostile(66, 1, peer.listen_port)
        hostile.complete()
        hostile.send(wire.SHARE, wire.share(1, SIZE, WHOLE))
        assert hostile.is_dropped()
        hostile.close()
        assert peer.release()
    finally:
        peer.close()
