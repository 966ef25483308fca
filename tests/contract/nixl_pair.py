"""Pairs of clusters that are linked over NIXL, also where the test run has another transport."""

from __future__ import annotations

from typing import Any

import pytest

from contract.cluster import Cluster
from contract.fixtures import MakeLocal, MakePeer
from contract.peer import Peer
from vllm_llmdd_connector.datadist.nixl import find_nixl_library

needs_nixl = pytest.mark.skipif(
    not find_nixl_library(), reason="NIXL is not installed (extra nixl of this package)"
)


def nixl_pair(
    make_local: MakeLocal, make_peer: MakePeer, *, link_secret: str = "", **options: Any
) -> tuple[Cluster, Peer]:
    """Cluster 1 here and cluster 2 in a helper, linked; memory may be registered afterwards."""
    peer = make_peer(2, transport="nixl", link_secret=link_secret, **options)
    local = make_local(1, transport="nixl", **options)
    status = local.link(2, peer.listen_port, link_secret=link_secret)
    assert status.name == "LLM_SUCCESS", local.link_error(2)
    return local, peer
