"""Allocate, link, pull, unlink, free, again and again: memory, descriptors and threads stay.

300 times here; `make cycles` does it 10,000 times, with either generation of the API.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from contract.cluster import TRANSPORT_VARIABLE, Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import wait_until
from contract.first_cluster import FirstCluster
from contract.fixtures import MakeFirst, MakeLocal, MakePeer
from contract.peer import Peer

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

CYCLES = int(os.environ.get("LLMDD_CYCLES", "300"))
WARM_UP = 100
POOL = '{"memory_size": 1048576, "page_shift": 12}'
# Allocators keep what they may need again; a leak of one frame a cycle would be more than this.
MEMORY_KIB = 4096
# UCX allocates 0.9 MB for each link, on the threads that make them: that levels off later.
MEMORY_OVER_NIXL_KIB = 32768

Side = Cluster | Peer
Cycle = Callable[[int], None]


def pull(local: Cluster, peer: Peer, number: int, unlink: Callable[[bool], Any]) -> None:
    """Every second unlink is forced, so that the peer finds out by itself."""
    key = local.api.CacheKey(2, number)
    source = peer.allocate_rows(keys=[key], seed=number)
    target = local.allocate_rows(seed=number + 1)
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
    local.pull_cache(key, target)
    row = slice(0, 256)
    assert [t[row] for t in local.dump(target)] == [t[row] for t in peer.dump(source)]
    assert unlink(number % 2 == 0).name == "LLM_SUCCESS"
    for side, cache in ((local, target), (peer, source)):
        side.deallocate(cache)
        side.discard_caches([cache], [])


def descriptors_and_threads(sides: list[Any]) -> list[tuple[int, int]]:
    return [(side.descriptors(), side.native_threads()) for side in sides]


def check_cycles(local: Cluster, peer: Peer, cycle: Cycle) -> None:
    sides: list[Any] = [local, peer]
    over_nixl = os.environ.get(TRANSPORT_VARIABLE) == "nixl"
    allowed_kib = MEMORY_OVER_NIXL_KIB if over_nixl else MEMORY_KIB
    for number in range(WARM_UP):
        cycle(number)
    before = descriptors_and_threads(sides)
    memory = [side.resident_kib() for side in sides]
    for number in range(WARM_UP, WARM_UP + CYCLES):
        cycle(number)

    def settled() -> bool:
        # The peer joins the thread of its last link when the next one comes.
        now = descriptors_and_threads(sides)
        return all(
            fds_now <= fds + 4 and threads_now <= threads + 1
            for (fds, threads), (fds_now, threads_now) in zip(before, now, strict=True)
        )

    wait_until(settled)
    for side, kib in zip(sides, memory, strict=True):
        assert side.resident_kib() < kib + allowed_kib
        assert side.pool_used() == 0


def test_cycles_leave_nothing_behind(make_local: MakeLocal, make_peer: MakePeer) -> None:
    local, peer = make_local(remote=False, pool=POOL), make_peer(2, remote=False, pool=POOL)

    def cycle(number: int) -> None:
        pull(local, peer, number, lambda force: local.unlink(2, force=force))

    check_cycles(local, peer, cycle)


def test_cycles_of_the_first_generation_leave_nothing_behind(
    make_first: MakeFirst, prompt: Peer
) -> None:
    """Half of the caches are given up, the others collected."""
    local: FirstCluster = make_first()

    def cycle(number: int) -> None:
        def unlink(force: bool) -> Any:
            return local.unlink_from(2, prompt.listen_port, force=force)

        pull(local, prompt, number, unlink)
        local.drop(local.allocate_blocks(seed=number))

    check_cycles(local, prompt, cycle)
