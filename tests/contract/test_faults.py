"""Peers that die, stop or are too slow; memory that is not there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from contract.actions import BackgroundPull, large_source
from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor, remote_mode
from contract.errors import refused
from contract.fixtures import MakeLocal, MakePeer, Pair
from contract.memory import block_pieces, moved
from contract.peer import Peer


class TestKilledPeer:
    def test_pull_from_a_dead_peer_fails(self, pair: Pair) -> None:
        local, peer = pair()
        peer.add_blocks()
        cache = local.add_blocks()
        before = local.dump(cache)
        peer.kill()
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert local.dump(cache) == before

    def test_waiting_pull_ends_at_once(self, pair: Pair) -> None:
        """The bound of 10 minutes shows that nothing waits for sync_kv_timeout."""
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local, start=False)
        peer.stop()
        pull.start()
        peer.kill()
        assert pull.status() == "LLM_FAILED"

    def test_pull_that_is_copying_fails(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.kill()
        assert pull.status() == "LLM_FAILED"

    @remote_mode
    def test_waiting_push_ends_at_once(self, pair: Pair) -> None:
        local, peer = pair(timeout_ms=600_000)
        peer.add_blocks()
        cache = local.add_blocks()
        peer.stop()
        killer = threading.Thread(target=peer.kill)
        killer.start()
        with refused(local.api, "LLM_FAILED"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        killer.join()

    def test_c79_unlink_needs_force(self, pair: Pair) -> None:
        local, peer = pair()
        peer.kill()
        assert local.unlink(2).name == "LLM_UNLINK_FAILED"
        assert local.link_error(2) != ""
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.unlink(2).name == "LLM_SUCCESS"

    def test_c79_restarted_peer_links_again(
        self, pair: Pair, make_peer: MakePeer, remote: bool
    ) -> None:
        local, peer = pair()
        cache = local.add_blocks()
        peer.kill()
        successor = make_peer(2, remote=remote)
        source = successor.add_blocks(seed=100)
        assert local.link(2, successor.listen_port).name == "LLM_ALREADY_LINK"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.link(2, successor.listen_port).name == "LLM_SUCCESS"
        before = local.dump(cache)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, [1], [2])
        assert local.dump(cache) == moved(
            before, successor.dump(source), block_pieces([1], [2], 64)
        )

    def test_restarted_peer_may_dial_without_an_unlink(
        self, pair: Pair, make_peer: MakePeer, remote: bool
    ) -> None:
        local, peer = pair()
        cache = local.add_blocks(seed=100)
        peer.kill()
        successor = make_peer(2, remote=remote)
        target = successor.add_blocks()
        assert successor.link(1, local.port()).name == "LLM_SUCCESS"
        before = successor.dump(target)
        successor.pull_blocks(local.api.BlocksCacheKey(1), target, [1], [2])
        assert successor.dump(target) == moved(
            before, local.dump(cache), block_pieces([1], [2], 64)
        )

    def test_links_of_dead_dialers_do_not_pile_up(self, make_peer: MakePeer) -> None:
        """A restarted D is another cluster: P kept the link of every D that had died, three
        descriptors each, and refused the 513th."""
        p = make_peer(1)
        before, held = p.descriptors(), []
        for cluster_id in range(2, 10):
            d = make_peer(cluster_id)
            assert d.link(1, p.port()).name == "LLM_SUCCESS"
            d.kill()
            held.append(p.descriptors())
        # The last ones' are given back with the next link.
        assert held[-1] < before + 5 * (held[0] - before), held

    def test_peer_that_finalizes_in_order_is_gone_too(self, pair: Pair) -> None:
        local, peer = pair()
        cache = local.add_blocks()
        peer.finalize()
        with refused(local.api, "LLM_FAILED"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])


class TestStoppedPeer:
    @pytest.fixture
    def stopped(self, pair: Pair) -> Iterator[tuple[Cluster, Peer]]:
        local, peer = pair(timeout_ms=300)
        yield local, peer
        peer.resume()

    def test_c48_pull_times_out_and_nothing_changes_later(
        self, stopped: tuple[Cluster, Peer]
    ) -> None:
        local, peer = stopped
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        before = local.dump(cache)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.resume()
        assert peer.dump(source)  # it runs again and has seen the end of the link
        assert local.dump(cache) == before

    def test_pull_that_is_copying_times_out(self, pair: Pair) -> None:
        """The kernel copies from a stopped process; only the source's answer makes it count."""
        local, peer = pair(timeout_ms=3000)
        large_source(peer)
        pull = BackgroundPull(local)
        pull.wait_until_copying()
        peer.stop()
        assert pull.status() == "LLM_TIMEOUT"
        after = pull.dump()
        peer.resume()
        assert peer.port() == peer.listen_port
        assert pull.dump() == after

    def test_c48_timed_out_link_refuses_until_it_is_linked_again(
        self, stopped: tuple[Cluster, Peer]
    ) -> None:
        local, peer = stopped
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        key = local.api.BlocksCacheKey(2)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.pull_blocks(key, cache, [0], [0])
        peer.resume()
        with refused(local.api, "LLM_FAILED", says="link again"):
            local.pull_blocks(key, cache, [0], [0])
        assert local.unlink(2).name == "LLM_UNLINK_FAILED"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        before = local.dump(cache)
        local.pull_blocks(key, cache, [0], [0])
        assert local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))

    @remote_mode
    def test_c48_push_times_out_and_is_not_done_later(self, stopped: tuple[Cluster, Peer]) -> None:
        """The source may reuse its memory after the timeout, so the peer must not read it then."""
        local, peer = stopped
        target, cache = peer.add_blocks(), local.add_blocks(seed=100)
        before = peer.dump(target)
        peer.stop()
        with refused(local.api, "LLM_TIMEOUT"):
            local.push_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        peer.resume()
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        # A new link is accepted only after the old one has ended at the peer.
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert peer.dump(target) == before

    def test_unlink_times_out_and_force_does_not_wait(self, stopped: tuple[Cluster, Peer]) -> None:
        local, peer = stopped
        peer.stop()
        assert local.unlink(2, timeout_ms=100).name == "LLM_UNLINK_FAILED"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"

    @refused_by_vendor(Restriction.LINK_WAITS_FOR_EVER)
    def test_link_to_a_stopped_peer_ends_at_its_timeout(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.stop()
        try:
            assert local.link(2, peer.listen_port, timeout_ms=200).name == "LLM_LINK_FAILED"
        finally:
            peer.resume()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
