"""A process that runs out of descriptors in the middle of a handshake."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

import pytest

from contract.actions import pull_works
from contract.engines import Restriction, refused_by_vendor
from contract.fixtures import MakeLocal
from contract.peer import Peer

pytestmark = [
    refused_by_vendor(Restriction.REGISTER_FIRST),
    pytest.mark.within_a_host,
    pytest.mark.skipif(
        "ASAN_OPTIONS" in os.environ, reason="UBSan opens a pipe to look whether memory is there"
    ),
]


@pytest.fixture
def peer(engine: str) -> Iterator[Peer]:
    """A new process, whose descriptors have no gaps."""
    peer = Peer()
    try:
        peer.create(2, api=engine)
        yield peer
        assert peer.release()
    finally:
        peer.close()


def test_link_is_made_or_refused_at_once(make_local: MakeLocal, peer: Peer) -> None:
    """Once it waited for its deadline where the last descriptor was wanted for a copy."""
    local = make_local()
    statuses = set()
    for num_left in range(2, 12):
        soft, hard = resource.prlimit(peer.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (peer.descriptors() + num_left, hard))
        try:
            status = local.link(2, peer.listen_port).name
        finally:
            resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (soft, hard))
        statuses.add(status)
        if status != "LLM_SUCCESS":
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert pull_works(local, peer, cache, source)
        local.unregister(cache)
        peer.unregister(source)
        assert local.unlink(2).name == "LLM_SUCCESS"
    assert statuses == {"LLM_LINK_FAILED", "LLM_SUCCESS"}
