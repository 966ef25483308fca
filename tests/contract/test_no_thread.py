"""A process that gets no thread any more: what needed one fails alone, and the process lives on."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contract.actions import MEMBERS, pull_works, wait_for_comm
from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import refused
from contract.fixtures import MakeLocal
from contract.peer import Peer

pytestmark = [
    refused_by_vendor(Restriction.REGISTER_FIRST),
    pytest.mark.within_a_host,
    pytest.mark.skipif(
        "ASAN_OPTIONS" in os.environ, reason="AddressSanitizer needs address space of its own"
    ),
]

LEFT_BYTES = 2 << 20
"""Of address space: enough for anything but a thread's stack."""


@pytest.fixture
def peer(engine: str) -> Iterator[Peer]:
    """A new process: one that has had threads keeps their stacks for the next ones."""
    peer = Peer()
    try:
        peer.create(2, api=engine, remote=True)
        yield peer
        assert peer.release()
    finally:
        peer.close()


@contextmanager
def no_thread(peer: Peer) -> Iterator[None]:
    status = Path(f"/proc/{peer.pid}/status").read_text()
    taken_kib = int(status.partition("VmSize:")[2].split()[0])
    soft, hard = resource.prlimit(peer.pid, resource.RLIMIT_AS)
    resource.prlimit(peer.pid, resource.RLIMIT_AS, (1024 * taken_kib + LEFT_BYTES, hard))
    try:
        yield
    finally:
        resource.prlimit(peer.pid, resource.RLIMIT_AS, (soft, hard))


def pulls(local: Cluster, peer: Peer) -> bool:
    return pull_works(local, peer, local.add_blocks(), peer.add_blocks(seed=100))


def test_its_own_link_fails_alone(make_local: MakeLocal, peer: Peer) -> None:
    local = make_local(remote=True)
    with no_thread(peer):
        assert peer.link(1, local.port()).name == "LLM_LINK_FAILED"
        assert "thread does not start" in peer.link_error(1)
    assert peer.link(1, local.port()).name == "LLM_SUCCESS"
    assert pulls(local, peer)


def test_link_by_another_fails_alone(make_local: MakeLocal, peer: Peer) -> None:
    local = make_local(remote=True)
    with no_thread(peer):
        assert local.link(2, peer.listen_port, 2000).name == "LLM_LINK_FAILED"
    assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
    assert pulls(local, peer)


def test_several_links_fail_alone(make_local: MakeLocal, peer: Peer) -> None:
    """They would be made on several threads; 7 and 8 are not who listens there."""
    local = make_local(remote=True)
    with no_thread(peer):
        ports = {cluster_id: local.port() for cluster_id in (1, 7, 8)}
        assert {status.name for status in peer.link_several(ports)} == {"LLM_LINK_FAILED"}
    assert peer.link(1, local.port()).name == "LLM_SUCCESS"
    assert pulls(local, peer)


def test_comm_fails_alone(make_local: MakeLocal, peer: Peer) -> None:
    local, name = make_local(remote=True), "no thread"
    with no_thread(peer), refused(local.api, "LLM_LINK_FAILED", says="thread does not start"):
        peer.link_members(name, MEMBERS)
    comm_ids = [cluster.link_members(name, MEMBERS) for cluster in (local, peer)]
    wait_for_comm(local, comm_ids[0], "OK")


def test_transfer_fails_alone(peer: Peer) -> None:
    """It once ended with an error that callers do not expect, and vLLM's worker with it."""
    cache = peer.add_blocks()
    with no_thread(peer):
        [refusal] = peer.transfer_to_nobody(cache)
        assert "LLM_FAILED" in refusal
        assert "the transfer's thread does not start" in refusal
    assert peer.transfer_to_nobody(cache) == ["LLM_NOT_YET_LINK"]
