"""Fixtures of the host engine's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from contract.cluster import Cluster
from contract.peer import Peer
from hypothesis import settings

from native.hostile import Hostile

# No test measures time: machines and sanitizers are as slow as they are.
settings.register_profile("native", deadline=None)
settings.load_profile("native")


@pytest.fixture
def victim() -> Iterator[Cluster]:
    """An engine in this process, cluster 1, that listens."""
    cluster = Cluster(1, timeout_ms=2000)
    yield cluster
    cluster.finalize()


@pytest.fixture(scope="module")
def victim_process() -> Iterator[Peer]:
    """An engine in another process, cluster 1, that must survive everything."""
    peer = Peer()
    peer.create(1, timeout_ms=2000)
    peer.add_blocks(seed=100)
    yield peer
    peer.release()
    peer.close()


@pytest.fixture
def attack(victim_process: Peer) -> Iterator[Callable[[], Hostile]]:
    """Makes hostile peers, cluster 66, that have said Hello to the victim process."""
    made: list[Hostile] = []

    def make() -> Hostile:
        made.append(Hostile(66, 1, victim_process.listen_port))
        return made[-1]

    yield make
    for hostile in made:
        hostile.close()
