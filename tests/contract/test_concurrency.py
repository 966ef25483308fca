"""Several threads, several links, and what thousands of cycles leave behind."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from contract.cluster import block_pieces, moved
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused, wait_until
from contract.fixtures import MakeLocal, MakePeer, Pair


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
        peer.add_blocks()
        cache = local.add_blocks()
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

    def test_c87_failed_links(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer, local = make_peer(2), make_local()
        for _ in range(20):
            local.link(3, peer.listen_port)
        before = local.descriptors(), local.native_threads()
        for _ in range(200):
            assert local.link(3, peer.listen_port).name == "LLM_LINK_FAILED"
        assert (local.descriptors(), local.native_threads()) == before

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
        assert (local.descriptors(), local.native_threads()) == before
