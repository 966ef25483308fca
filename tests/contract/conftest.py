"""Fixtures of the contract suite: one run per engine of the LLM-DataDist API."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from contract.cluster import HOST_ENGINE, Cluster
from contract.peer import Peer


@pytest.fixture(params=[HOST_ENGINE], ids=["host"])
def engine(request: pytest.FixtureRequest) -> str:
    """Module name of the engine under test."""
    return str(request.param)


@pytest.fixture
def api(engine: str) -> Any:
    return importlib.import_module(engine)


@pytest.fixture(params=[False, True], ids=["message", "remote"])
def remote(request: pytest.FixtureRequest) -> bool:
    """Both transfer modes: enable_remote_cache_accessible off and on."""
    return bool(request.param)


@pytest.fixture
def make_local(engine: str) -> Iterator[Callable[..., Cluster]]:
    """Makes the cluster of this process (one at a time)."""
    made: list[Cluster] = []

    def make(cluster_id: int = 1, **options: Any) -> Cluster:
        made.append(Cluster(cluster_id, api=engine, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.finalize()


@pytest.fixture(scope="session")
def idle_peers() -> Iterator[list[Peer]]:
    """Helper processes that no test uses at the moment."""
    peers: list[Peer] = []
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture
def make_peer(engine: str, idle_peers: list[Peer]) -> Iterator[Callable[..., Peer]]:
    """Makes clusters in processes of their own."""
    made: list[Peer] = []

    def make(cluster_id: int = 2, **options: Any) -> Peer:
        made.append(idle_peers.pop() if idle_peers else Peer())
        made[-1].create(cluster_id, api=engine, **options)
        return made[-1]

    yield make
    for peer in made:
        if peer.release():
            idle_peers.append(peer)
        else:
            peer.close()


@pytest.fixture
def pair(
    make_local: Callable[..., Cluster], make_peer: Callable[..., Peer]
) -> Callable[..., tuple[Cluster, Peer]]:
    """Makes cluster 1 here and cluster 2 in a helper, linked."""

    def make(**options: Any) -> tuple[Cluster, Peer]:
        peer = make_peer(2, **options)
        local = make_local(1, **options)
        status = local.link(2, peer.listen_port)
        assert status == local.api.LLMStatusCode.LLM_SUCCESS, local.link_error(2)
        return local, peer

    return make
