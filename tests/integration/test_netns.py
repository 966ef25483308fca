"""Two engines in two network namespaces, joined by a veth pair: nothing but TCP between them.

UCX would take two namespaces of one kernel for one host and use shared memory, so it is told to use
TCP, and a transfer counts only if the bytes were seen on the veth.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from contract.memory import block_pieces, moved
from contract.nixl_pair import needs_nixl
from contract.peer import Peer
from fakes.netns import NEEDS_NAMESPACES, Namespace, joined_namespaces

from vllm_llmdd_connector.datadist import BlocksCacheKey

BLOCKS, BLOCK_BYTES, TENSORS = 256, 16384, 4


pytestmark = [needs_nixl, NEEDS_NAMESPACES]


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    with joined_namespaces() as sides:
        yield sides


@pytest.fixture
def engines(
    namespaces: tuple[Namespace, Namespace], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Peer, Peer]]:
    """Clusters 1 and 2, linked by 1."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    peers: list[Peer] = []
    try:
        for number, side in enumerate(namespaces, 1):
            peers.append(Peer(*side.inside))
            peers[-1].create(number, transport="nixl", host=side.ip)
        first, second = peers
        status = first.link(2, second.listen_port, host=namespaces[1].ip)
        assert status.name == "LLM_SUCCESS", first.link_error(2)
        yield first, second
        for peer in peers:
            peer.discard()
    finally:
        for peer in peers:
            peer.close()


def test_pull_and_push_cross_the_veth(
    namespaces: tuple[Namespace, Namespace], engines: tuple[Peer, Peer]
) -> None:
    shape = {"tensors": TENSORS, "blocks": BLOCKS, "block_bytes": BLOCK_BYTES}
    here, there = engines
    cache, source = here.add_blocks(**shape), there.add_blocks(**shape, seed=100)
    dice = random.Random(3)
    src, dst = (dice.sample(range(BLOCKS), 200) for _ in range(2))
    content, before = there.dump(source), here.dump(cache)
    kv_bytes = len(src) * TENSORS * BLOCK_BYTES

    seen = namespaces[0].received_bytes()
    here.pull_blocks(BlocksCacheKey(2), cache, src, dst)
    pulled = moved(before, content, block_pieces(src, dst, BLOCK_BYTES))
    assert here.dump(cache) == pulled
    assert namespaces[0].received_bytes() - seen >= kv_bytes

    seen = namespaces[1].received_bytes()
    here.push_blocks(BlocksCacheKey(2), cache, dst, src[::-1])
    pushed = moved(content, pulled, block_pieces(dst, src[::-1], BLOCK_BYTES))
    assert there.dump(source) == pushed
    assert namespaces[1].received_bytes() - seen >= kv_bytes
