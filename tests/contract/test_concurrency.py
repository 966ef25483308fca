"""Several threads, several links, and what thousands of cycles leave behind."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused, wait_until
from contract.fixtures import MakeLocal, MakePeer, Pair
from contract.memory import block_pieces, moved


class TestThreads:
    def test_c86_concurrent_pulls_on_several_links(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        local = make_local()
        peers = [make_peer(cluster_id) for cluster_id in (2, 3, 4)]
        sources = [peer.add_blocks(blocks=64, seed=100 * peer.cluster_id) for peer in peers]
        caches = [local.add_blocks(blocks=64, model_id=model) for model in range(3)]
        for peer in peers:
            assert local.link(peer.cluster_id, peer.listen_port).name == "LLM_SUCCESS"
        contents = [peer.dump(source) for peer, source in zip(peers, sources, strict=True)]

        def pull(index: int) -> bool:
            dice = random.Random(index)
            key = local.api.BlocksCacheKey(peers[index].cluster_id)
            for _ in range(100):
                src, dst = dice.sample(range(64), 20), dice.sample(range(64), 20)
                before = local.dump(caches[index])
                local.pull_blocks(key, caches[index], src, dst)
                after = moved(before, contents[index], block_pieces(src, dst, 64))
                if local.dump(caches[index]) != after:
                    return False
            return True

        with ThreadPoolExecutor(3) as pool:
            assert all(pool.map(pull, range(3)))

    def test_c86_two_sources_and_two_destinations(
        self, make_local: MakeLocal, make_peer: MakePeer, remote: bool
    ) -> None:
        """Cluster ids of 48 bits, as made from an address and a port; all pull at once."""
        ids = [(10 << 40) + (192 << 16) + port for port in (7000, 7001, 7002, 7003)]
        local, other = make_local(ids[0], remote=remote), make_peer(ids[1], remote=remote)
        sources = [make_peer(cluster_id, remote=remote) for cluster_id in ids[2:]]
        contents = []
        for source in sources:
            contents.append(source.dump(source.add_blocks(seed=source.cluster_id % 100)))
        # One destination for each source, in both pulling processes.
        mine = [local.add_blocks(model_id=model) for model in range(2)]
        theirs = [other.add_blocks(model_id=model) for model in range(2)]
        old = [
            side.dump(cache)
            for side, caches in ((local, mine), (other, theirs))
            for cache in caches
        ]
        for source in sources:
            for side in (local, other):
                assert side.link(source.cluster_id, source.listen_port).name == "LLM_SUCCESS"
        for count in range(30):
            src, dst = [count % 16, (count + 5) % 16], [(3 * count) % 16, (3 * count + 1) % 16]
            for index, source in enumerate(sources):
                key = local.api.BlocksCacheKey(source.cluster_id)
                other.start("pull_blocks", key, theirs[index], src, dst)
                local.pull_blocks(key, mine[index], src, dst)
                other.result()
                for place in (index, 2 + index):
                    old[place] = moved(old[place], contents[index], block_pieces(src, dst, 64))
        new = [
            side.dump(cache)
            for side, caches in ((local, mine), (other, theirs))
            for cache in caches
        ]
        assert new == old

    @refused_by_vendor(Restriction.ONE_CALL_PER_LINK)
    def test_concurrent_pulls_on_one_link(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(blocks=64, seed=100)
        cache = local.add_blocks(blocks=64)
        before = local.dump(cache)

        def pull(index: int) -> None:
            for _ in range(50):
                local.pull_blocks(local.api.BlocksCacheKey(2), cache, [63 - index], [index])

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(pull, range(8)))
        pairs = block_pieces([63 - i for i in range(8)], list(range(8)), 64)
        assert local.dump(cache) == moved(before, peer.dump(source), pairs)

    @remote_mode
    def test_pulls_and_pushes_in_both_directions(self, pair: Pair) -> None:
        """Both ends start transfers while they serve the other's."""
        local, peer = pair()
        mine, theirs = local.add_blocks(blocks=64), peer.add_blocks(blocks=64, seed=100)
        blocks = list(range(10))
        for _ in range(50):
            peer.start("pull_blocks", local.api.BlocksCacheKey(1), theirs, blocks, blocks)
            local.push_blocks(local.api.BlocksCacheKey(2), mine, [20], [20])
            local.pull_blocks(local.api.BlocksCacheKey(2), mine, [30], [30])
            peer.result()
        assert peer.dump(theirs)[0][:640] == local.dump(mine)[0][:640]

    def test_other_threads_run_while_a_pull_waits(self, pair: Pair) -> None:
        """A stopped peer keeps the pull waiting; this thread needs the GIL to continue it."""
        local, peer = pair()
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        before = local.dump(cache)
        peer.stop()
        pull = threading.Thread(
            target=local.pull_blocks, args=(local.api.BlocksCacheKey(2), cache, [1], [1])
        )
        pull.start()
        peer.resume()
        pull.join()
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([1], [1], 64))

    @refused_by_vendor(Restriction.REGISTER_FIRST)
    def test_registering_and_pulling_together(self, pair: Pair) -> None:
        local, peer = pair()
        source = peer.add_blocks(seed=100)
        cache = local.add_blocks()
        before = local.dump(cache)
        done = threading.Event()

        def register() -> None:
            while not done.is_set():
                local.unregister(local.add_blocks(model_id=5))

        registering = threading.Thread(target=register)
        registering.start()
        for _ in range(300):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        done.set()
        registering.join()
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))


class TestIdle:
    def test_threads_sleep_until_there_is_work(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        """An accept thread and three link threads: none wakes up by itself."""
        local = make_local()
        for cluster_id in (2, 3, 4):
            peer = make_peer(cluster_id)
            assert local.link(cluster_id, peer.listen_port).name == "LLM_SUCCESS"

        def sleeping() -> bool:
            before = local.wake_ups()
            time.sleep(0.3)
            return local.wake_ups() == before

        wait_until(sleeping)  # greetings may still be ending


class TestNothingIsLeftBehind:
    def test_c87_links(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer, local = make_peer(), make_local()
        peer.add_blocks()
        cache = local.add_blocks()

        def cycle(force: bool) -> None:
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
            assert local.unlink(2, force=force).name == "LLM_SUCCESS"

        for count in range(20):
            cycle(force=count % 2 == 0)
        cycle(force=False)  # the peer has seen the end of the last link
        before = [(side.descriptors(), side.native_threads()) for side in (local, peer)]
        for count in range(300):
            cycle(force=count % 2 == 0)
        cycle(force=False)
        after = [(side.descriptors(), side.native_threads()) for side in (local, peer)]
        # A thread that has ended is joined at the next link, so one more or less is no growth.
        for (fds, threads), (fds_now, threads_now) in zip(before, after, strict=True):
            assert fds_now <= fds + 4
            assert threads_now <= threads + 1

    def test_c87_ten_thousand_allocations(self, make_local: MakeLocal) -> None:
        local = make_local(pool='{"memory_size": 1048576, "page_shift": 12}')
        rows, blocks = local._desc(4, 4, 64, False), local._desc(2, 8, 64, False)
        manager = local.manager

        def cycle(request: int) -> None:
            key = local.api.CacheKey(1, request)
            cache = manager.allocate_cache(rows, [key])
            other = manager.allocate_blocks_cache(blocks, local.api.BlocksCacheKey(1, 3))
            manager.deallocate_cache(cache)
            manager.remove_cache_key(key)
            manager.deallocate_blocks_cache(other)

        for request in range(500):
            cycle(request)
        before = local.resident_kib(), local.descriptors(), local.native_threads()
        for request in range(10_000):
            cycle(request)
        assert local.pool_used() == 0
        assert local.resident_kib() < before[0] + 4096
        assert (local.descriptors(), local.native_threads()) == before[1:]

    def test_c87_failed_links(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer, local = make_peer(2), make_local()
        for _ in range(20):
            local.link(3, peer.listen_port)
        before = local.descriptors(), local.native_threads()
        for _ in range(200):
            assert local.link(3, peer.listen_port).name == "LLM_LINK_FAILED"
        assert local.descriptors() <= before[0] + 1
        assert local.native_threads() <= before[1] + 1

    @refused_by_vendor(Restriction.REGISTER_FIRST)
    def test_c87_registrations_and_refused_calls(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()

        def cycle() -> None:
            cache = local.add_blocks(tensors=1)
            with refused(local.api):
                local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
            local.unregister(cache)
            del local.caches[cache], local.tensors[cache]

        for _ in range(200):
            cycle()
        before = local.resident_kib()
        for _ in range(2000):
            cycle()
        assert local.resident_kib() < before + 4096

    def test_c87_engines(self, make_local: MakeLocal) -> None:
        make_local().finalize()
        local = make_local()
        local.finalize()
        before = local.descriptors(), local.native_threads()
        for _ in range(100):
            make_local().finalize()
        assert local.descriptors() <= before[0]
        assert local.native_threads() == before[1]
