"""Fixtures of the contract suite: one run per engine of the LLM-DataDist API."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.install import vendor_importable

from contract.actions import link_later
from contract.cluster import TRANSPORT_VARIABLE, Cluster
from contract.engines import (
    HOST_ENGINE,
    TESTS_PATH,
    VENDOR_ENGINE,
    VENDOR_PATH,
    import_engine,
)
from contract.first_cluster import FirstCluster
from contract.fixtures import Linked, MakeFirst, MakePeer
from contract.peer import Peer


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "refused_by_vendor(restriction): what only the host engine allows"
    )
    config.addinivalue_line("markers", "within_a_host: of links that do not go over NIXL")
    if transport := config.getoption("--transport"):
        os.environ[TRANSPORT_VARIABLE] = transport
        # Between processes of one host UCX would take shared memory.
        os.environ.setdefault("UCX_TLS", "tcp")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--transport") != "nixl":
        return
    skip = pytest.mark.skip(reason="links over NIXL use nothing that one host has")
    for item in items:
        if item.get_closest_marker("within_a_host"):
            item.add_marker(skip)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = metafunc.definition.iter_markers("parametrize")
    if "engine" not in metafunc.fixturenames or any(mark.args[0] == "engine" for mark in marks):
        return
    engines = {"host": HOST_ENGINE, "vendor": VENDOR_ENGINE}
    only_host = metafunc.config.getoption("--transport")
    if only_host or metafunc.definition.get_closest_marker("refused_by_vendor"):
        del engines["vendor"]
    metafunc.parametrize("engine", engines.values(), ids=engines.keys(), indirect=True)


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Module name of the engine under test; it can be imported here and in child processes."""
    if request.param == VENDOR_ENGINE:
        path = [VENDOR_PATH, TESTS_PATH, *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        with vendor_importable(monkeypatch):
            yield VENDOR_ENGINE
    else:
        yield HOST_ENGINE


@pytest.fixture
def api(engine: str) -> Any:
    return import_engine(engine)


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
        cluster.discard()


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
    make_local: Callable[..., Cluster], make_peer: Callable[..., Peer], remote: bool
) -> Callable[..., tuple[Cluster, Peer]]:
    """Makes cluster 1 here and cluster 2 in a helper, linked (see `link_later`)."""

    def make(**options: Any) -> tuple[Cluster, Peer]:
        options = {"remote": remote, **options}
        peer, local = make_peer(2, **options), make_local(1, **options)
        link_later(local, peer)
        return local, peer

    return make


@pytest.fixture
def name() -> str:
    """A comm name that no other test and no earlier run uses."""
    return f"comm-{uuid.uuid4()}"


@pytest.fixture
def make_first(engine: str) -> Iterator[MakeFirst]:
    """Makes the first-generation cluster of this process, number 1."""
    made: list[FirstCluster] = []

    def make(role: str = "DECODER", **options: Any) -> FirstCluster:
        made.append(FirstCluster(1, role=role, api=engine, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.discard()


@pytest.fixture
def prompt(make_peer: MakePeer) -> Peer:
    """A PROMPT of the first generation in another process, number 2."""
    return make_peer(2, role="PROMPT")


@pytest.fixture
def linked(make_first: MakeFirst, prompt: Peer) -> Linked:
    """A DECODER here, linked to a PROMPT in another process."""
    local = make_first()
    assert local.link(2, prompt.listen_port).name == "LLM_SUCCESS"
    return local, prompt
