"""Links over NIXL: what differs from links within a host. The whole suite runs over them with
``--transport nixl``."""

from __future__ import annotations

import random
import threading
import time

import pytest

from contract.actions import MIB, BackgroundPull, by_key, large_source, names, pull_works
from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import refused, wait_until
from contract.fixtures import MakeLocal, MakePeer
from contract.layerwise import recorder
from contract.memory import block_pieces, moved
from contract.nixl_pair import needs_nixl, nixl_pair

pytestmark = [needs_nixl, refused_by_vendor(Restriction.NO_EXTENSIONS)]

STAGING_MIB = 64  # the default
SECRET = "a secret that both know"


@pytest.fixture
def dice() -> random.Random:
    return random.Random(11)


class TestBytes:
    @pytest.mark.parametrize("block_bytes", [1, 100, 16384])
    def test_random_blocks_both_ways(
        self, make_local: MakeLocal, make_peer: MakePeer, dice: random.Random, block_bytes: int
    ) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        shape = {"tensors": 4, "blocks": 300, "block_bytes": block_bytes}
        here, there = local.add_blocks(**shape, seed=7), peer.add_blocks(**shape, seed=100)
        key = local.api.BlocksCacheKey(2)
        for count in (1, 2, 299):
            src, dst = dice.sample(range(300), count), dice.sample(range(300), count)
            before, content = local.dump(here), peer.dump(there)
            local.pull_blocks(key, here, src, dst)
            after = moved(before, content, block_pieces(src, dst, block_bytes))
            assert local.dump(here) == after
            local.push_blocks(key, here, dst, src)
            assert peer.dump(there) == moved(content, after, block_pieces(dst, src, block_bytes))

    def test_more_bytes_than_all_staging_slots(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        shape = {"tensors": 1, "blocks": STAGING_MIB + 9, "block_bytes": MIB}
        here, there = local.add_blocks(**shape), peer.add_blocks(**shape, seed=100)
        blocks = list(range(STAGING_MIB + 9))
        local.pull_blocks(local.api.BlocksCacheKey(2), here, blocks, blocks)
        assert local.dump(here) == peer.dump(there)

    def test_the_most_staging_memory_that_may_be_asked_for(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        """It was counted in 32 bits, so that nothing was left of 4,096 MiB."""
        local, peer = nixl_pair(make_local, make_peer, staging_mib=4096)
        assert pull_works(local, peer, local.add_blocks(), peer.add_blocks(seed=100))

    def test_both_sides_push_at_once(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        shape = {"tensors": 2, "blocks": 64, "block_bytes": 16384}
        source, target = local.add_blocks(**shape, seed=3), local.add_blocks(**shape, model_id=1)
        far_source, far_target = (
            peer.add_blocks(**shape, seed=90),
            peer.add_blocks(**shape, model_id=1),
        )
        blocks = list(range(64))
        for _ in range(20):
            peer.start("push_blocks", local.api.BlocksCacheKey(1, 1), far_source, blocks, blocks)
            local.push_blocks(local.api.BlocksCacheKey(2, 1), source, blocks, blocks)
            peer.result()
        assert local.dump(target) == peer.dump(far_source)
        assert peer.dump(far_target) == local.dump(source)

    def test_layers_go_one_by_one(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        source, target = local.add_blocks(seed=100), peer.add_blocks()
        before, content = peer.dump(target), local.dump(source)
        task = local.transfer(recorder(local.api), source, [by_key(local, 2)], [3, 4], [8, 1])
        assert names(task) == ["LLM_SUCCESS"]
        assert peer.dump(target) == moved(before, content, block_pieces([3, 4], [8, 1], 64))

    def test_several_pulls_share_a_link(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        shape = {"tensors": 2, "blocks": 128, "block_bytes": 65536}
        there = peer.add_blocks(**shape, seed=100)
        caches = [local.add_blocks(**shape, model_id=index) for index in range(6)]
        blocks = list(range(128))
        key = local.api.BlocksCacheKey(2)
        threads = [
            threading.Thread(target=local.pull_blocks, args=(key, cache, blocks, blocks))
            for cache in caches
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(local.dump(cache) == peer.dump(there) for cache in caches)


class TestSecret:
    def test_who_knows_it_links(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer, link_secret=SECRET)
        peer.add_blocks(seed=100)
        cache = local.add_blocks()
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    @pytest.mark.parametrize(("theirs", "given"), [(SECRET, ""), (SECRET, "x"), ("", SECRET)])
    def test_others_do_not(
        self, make_local: MakeLocal, make_peer: MakePeer, theirs: str, given: str
    ) -> None:
        peer = make_peer(2, transport="nixl", link_secret=theirs)
        local = make_local(1, transport="nixl")
        status = local.link(2, peer.listen_port, link_secret=given)
        assert status.name == "LLM_LINK_FAILED"
        assert "secret" in local.link_error(2)


class TestChoice:
    def test_one_side_is_enough(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer, local = make_peer(2, transport="nixl"), make_local(1, transport="auto")
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    def test_two_that_exclude_each_other(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer, local = make_peer(2, transport="cma"), make_local(1, transport="nixl")
        assert local.link(2, peer.listen_port).name == "LLM_PARAM_INVALID"
        assert "local cma, peer has nixl" in local.link_error(2)


class TestFaults:
    def test_stopped_source_writes_nothing_later(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        """Its bytes can only reach staging slots, which are not used again."""
        local, peer = nixl_pair(make_local, make_peer, timeout_ms=1000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.stop()
        assert pull.status() == "LLM_TIMEOUT"
        before = pull.dump()
        peer.resume()
        peer.cpu_ms()  # it runs again
        assert pull.dump() == before
        with refused(local.api, "LLM_FAILED"):
            pull_again(local)

    def test_stopped_destination_ends_a_push(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        local, peer = nixl_pair(make_local, make_peer, timeout_ms=1000)
        shape = {"tensors": 2, "blocks": 16, "block_bytes": MIB}
        source = local.add_blocks(**shape)
        peer.add_blocks(**shape)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.push_blocks(local.api.BlocksCacheKey(2), source, [0, 3], [0, 5])
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        peer.resume()

    def test_link_is_made_anew(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        there, here = peer.add_blocks(seed=100), local.add_blocks()
        for _ in range(3):
            assert local.unlink(2, force=True).name == "LLM_SUCCESS"
            wait_until(lambda: local.link(2, peer.listen_port).name == "LLM_SUCCESS")
            local.flip_byte(here, 0, 3)
            local.pull_blocks(local.api.BlocksCacheKey(2), here, [0], [0])
            assert local.dump(here)[0][:64] == peer.dump(there)[0][:64]

    def test_stopped_copy_leaves_the_link_usable(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        """Slots of a copy that was stopped are waited for, then used again."""
        local, peer = nixl_pair(make_local, make_peer)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        local.unregister(pull.cache_id)
        assert pull.status() == "LLM_KV_CACHE_NOT_EXIST"
        shape = {"tensors": 1, "blocks": STAGING_MIB + 9, "block_bytes": MIB, "model_id": 5}
        here, there = local.add_blocks(**shape), peer.add_blocks(**shape, seed=100)
        blocks = list(range(STAGING_MIB + 9))
        local.pull_blocks(local.api.BlocksCacheKey(2, 5), here, blocks, blocks)
        assert local.dump(here) == peer.dump(there)

    def test_source_that_is_unregistered(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        local, peer = nixl_pair(make_local, make_peer)
        source = large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.unregister(source)
        assert pull.status() == "LLM_KV_CACHE_NOT_EXIST"


def test_idle_links_cost_no_processor_time(make_local: MakeLocal, make_peer: MakePeer) -> None:
    """NIXL's own threads are off, and ours sleep."""
    local, peer = nixl_pair(make_local, make_peer)
    peer.add_blocks(seed=100)
    cache = local.add_blocks()
    local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def nobody_wakes_up() -> bool:
        before = local.wake_ups(), peer.wake_ups()
        time.sleep(0.5)
        return before == (local.wake_ups(), peer.wake_ups())

    # A thread that polls would wake up again and again.
    wait_until(nobody_wakes_up)


def pull_again(local: Cluster) -> None:
    cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB, model_id=9)
    local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
