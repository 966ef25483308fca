"""Two engines in two network namespaces, joined by a veth pair: nothing but TCP between them.

UCX would take two namespaces of one kernel for one host and use shared memory, so it is told to use
TCP, and a transfer counts only if the bytes were seen on the veth.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from contract.memory import block_pieces, moved
from contract.nixl_pair import needs_nixl
from contract.peer import Peer

from vllm_llmdd_connector.datadist import BlocksCacheKey

BLOCKS, BLOCK_BYTES, TENSORS = 256, 16384, 4


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def can_make_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"llmdd-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return False
    run("ip", "netns", "delete", name)
    return True


pytestmark = [
    needs_nixl,
    pytest.mark.skipif(
        not can_make_namespaces(), reason="network namespaces need root and iproute2's ip"
    ),
]


@dataclass(frozen=True)
class Namespace:
    name: str
    ip: str

    def peer(self) -> Peer:
        return Peer("ip", "netns", "exec", self.name)

    def received_bytes(self) -> int:
        path = "/sys/class/net/veth/statistics/rx_bytes"
        return int(run("ip", "netns", "exec", self.name, "cat", path))


@pytest.fixture
def namespaces() -> Iterator[tuple[Namespace, Namespace]]:
    sides = [Namespace(f"llmdd-{os.getpid()}-{n}", f"10.211.7.{n}") for n in (1, 2)]
    made: list[Namespace] = []
    try:
        for side in sides:
            run("ip", "netns", "add", side.name)
            made.append(side)
        first, second = sides
        run(
            *("ip", "link", "add", "veth", "netns", first.name, "type", "veth"),
            *("peer", "name", "veth", "netns", second.name),
        )
        for side in sides:
            inside = ("ip", "-n", side.name)
            run(*inside, "addr", "add", f"{side.ip}/24", "dev", "veth")
            run(*inside, "link", "set", "veth", "up")
            run(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for side in made:
            run("ip", "netns", "delete", side.name)


@pytest.fixture
def engines(
    namespaces: tuple[Namespace, Namespace], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Peer, Peer]]:
    """Clusters 1 and 2, linked by 1."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    peers: list[Peer] = []
    try:
        for number, side in enumerate(namespaces, 1):
            peers.append(side.peer())
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
