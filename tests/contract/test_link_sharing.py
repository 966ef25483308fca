"""A pull beside a layer-wise transfer on one link.

The vendor's documentation forbids it. Its first generation answers LLM_LINK_BUSY when the link is
not free within sync_kv_timeout, or serves its peer at the moment; its second generation lets calls
on one link wait for each other. Here both go on, and what the peer is asked later it answers later.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from contract.actions import names
from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.fixtures import Pair
from contract.layerwise import BLOCK, Destination, Held, blocks_of, recorder
from contract.memory import block_pieces, moved
from contract.peer import Peer

pytestmark = refused_by_vendor(Restriction.ONE_CALL_PER_LINK)


class Both:
    """Two layers that go to the peer, and a pull of another cache of it, over the same link."""

    def __init__(self, local: Cluster, peer: Peer, remote: bool) -> None:
        self.local, self.peer = local, peer
        self._sent = local.add_blocks(block_bytes=BLOCK, seed=100)
        self._to: Destination = blocks_of(local.api, remote, 2, peer, seed=200)
        self._pulled = peer.add_blocks(block_bytes=BLOCK, model_id=1, seed=300)
        self._into = local.add_blocks(block_bytes=BLOCK, model_id=1, seed=400)
        self._before = peer.dump(self._to.cache_id), local.dump(self._into)

    def transfer(self, answer: Callable[[int], Any] = lambda layer: True) -> Any:
        synchronizer = recorder(self.local.api, answer)
        configs = [self._to.config(range(2))]
        return self.local.transfer(synchronizer, self._sent, configs, [0, 1], [5, 2])

    def pull(self) -> str:
        key = self.local.api.BlocksCacheKey(2, 1)
        try:
            self.local.pull_blocks(key, self._into, [3], [4])
        except self.local.api.LLMException as error:
            return str(error.status_code.name)
        return "LLM_SUCCESS"

    def have_arrived(self) -> bool:
        there, here = self._before
        pushed = moved(there, self.local.dump(self._sent), block_pieces([0, 1], [5, 2], BLOCK))
        pulled = moved(here, self.peer.dump(self._pulled), block_pieces([3], [4], BLOCK))
        arrived = self.peer.dump(self._to.cache_id), self.local.dump(self._into)
        return arrived == (pushed, pulled)


@pytest.fixture
def make_both(pair: Pair, remote: bool) -> Callable[..., Both]:
    return lambda **options: Both(*pair(**options), remote)


def test_between_two_layers_a_pull_waits_for_nothing(make_both: Callable[..., Both]) -> None:
    both = make_both()
    held = Held(first=1)
    task = both.transfer(held)
    held.reached.wait()
    assert both.pull() == "LLM_SUCCESS"
    assert task.get_results(0)[0].name == "LLM_TIMEOUT"  # it still runs
    held.release()
    assert names(task) == ["LLM_SUCCESS"]
    assert both.have_arrived()


def test_behind_a_layer_that_is_being_copied_a_pull_waits(make_both: Callable[..., Both]) -> None:
    """The peer, stopped, has been sent the layer and the question."""
    both = make_both()
    both.peer.stop()
    task = both.transfer()
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(both.pull)
        both.peer.resume()
        assert pull.result() == "LLM_SUCCESS"
    assert names(task) == ["LLM_SUCCESS"]
    assert both.have_arrived()


def test_peer_that_answers_neither_in_time_ends_the_link(make_both: Callable[..., Both]) -> None:
    """Whichever runs out of time first says so; the other one says that the link has failed."""
    both = make_both(timeout_ms=300)
    both.peer.stop()
    task = both.transfer()
    results = [both.pull(), *names(task)]
    both.peer.resume()
    assert "LLM_TIMEOUT" in results
    assert set(results) <= {"LLM_TIMEOUT", "LLM_FAILED"}
