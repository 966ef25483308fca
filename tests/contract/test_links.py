"""link_clusters and unlink_clusters."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from contract.actions import pull_works
from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.errors import explains, refused
from contract.fixtures import MakeLocal, MakePeer, Pair
from contract.memory import block_pieces, moved
from contract.peer import Peer


class TestLinking:
    def test_both_ends_can_pull(self, pair: Pair) -> None:
        local, peer = pair()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert pull_works(local, peer, cache, source)
        before = peer.dump(source)
        peer.pull_blocks(local.api.BlocksCacheKey(1), source, [4], [5])
        assert peer.dump(source) == moved(before, local.dump(cache), block_pieces([4], [5], 64))

    def test_large_cluster_ids(self, make_local: MakeLocal, make_peer: MakePeer) -> None:
        peer = make_peer(2**48 - 1)
        local = make_local(2**64 - 1)
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert local.link(2**48 - 1, peer.listen_port).name == "LLM_SUCCESS"
        assert pull_works(local, peer, cache, source)

    def test_c77_second_link_is_refused(self, pair: Pair) -> None:
        local, peer = pair()
        assert local.link(2, peer.listen_port).name == "LLM_ALREADY_LINK"

    def test_the_listening_side_has_the_link_too(self, pair: Pair) -> None:
        local, peer = pair()
        assert peer.link(1, local.port()).name == "LLM_ALREADY_LINK"

    def test_c76_several_clusters_in_one_call(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peers = [make_peer(cluster_id) for cluster_id in (2, 3, 4)]
        local = make_local()
        infos = [local._info(peer.cluster_id, peer.listen_port) for peer in peers]
        closed = local._info(9, 1)
        no_address = local.api.LLMClusterInfo()
        no_address.remote_cluster_id = 8
        no_address.append_local_ip_info("127.0.0.1", 1)
        order = [infos[0], closed, infos[1], no_address, infos[2]]
        overall, statuses = local.datadist.link_clusters(order, 20000)
        assert [status.name for status in statuses] == [
            "LLM_SUCCESS",
            "LLM_LINK_FAILED",
            "LLM_SUCCESS",
            "LLM_PARAM_INVALID",
            "LLM_SUCCESS",
        ]
        assert overall.name == "LLM_PARAM_INVALID"  # the last failure
        overall, statuses = local.datadist.unlink_clusters(infos, 20000)
        assert overall.name == "LLM_SUCCESS"

    def test_both_sides_dial_at_once_and_one_link_results(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        for _ in range(30):
            peer.start("link", 1, local.port())
            mine = local.link(2, peer.listen_port).name
            theirs = peer.result().name
            assert "LLM_SUCCESS" in (mine, theirs)
            assert {mine, theirs} <= {"LLM_SUCCESS", "LLM_ALREADY_LINK"}
            assert pull_works(local, peer, cache, source)
            assert local.unlink(2).name == "LLM_SUCCESS"

    @refused_by_vendor(Restriction.ONE_CALL_PER_LINK)
    def test_concurrent_calls_for_one_cluster(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        with ThreadPoolExecutor(8) as pool:
            names = [
                status.name
                for status in pool.map(lambda _: local.link(2, peer.listen_port), range(8))
            ]
        assert names.count("LLM_SUCCESS") == 1
        assert names.count("LLM_ALREADY_LINK") == 7

    def test_pure_dialler_cannot_be_dialled_but_serves(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local(listen=False)
        cache, target = local.add_blocks(seed=100), peer.add_blocks()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        before = peer.dump(target)
        peer.pull_blocks(local.api.BlocksCacheKey(1), target, [4], [5])
        assert peer.dump(target) == moved(before, local.dump(cache), block_pieces([4], [5], 64))


class TestRefusals:
    def test_c77_closed_port(self, make_local: MakeLocal) -> None:
        local = make_local()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        assert local.link(2, port).name == "LLM_LINK_FAILED"
        assert explains(local, 2, f"127.0.0.1:{port}")
        assert explains(local, 2, "refused")

    @refused_by_vendor(Restriction.LINK_WAITS_FOR_EVER)
    def test_c77_silent_listener_is_left_at_the_timeout(self, make_local: MakeLocal) -> None:
        local = make_local()
        with socket.create_server(("127.0.0.1", 0)) as silent:
            status = local.link(2, silent.getsockname()[1], timeout_ms=200)
        assert status.name == "LLM_LINK_FAILED"
        assert explains(local, 2, "in time")

    def test_other_cluster_id_at_the_address(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(2), make_local()
        assert local.link(3, peer.listen_port).name == "LLM_LINK_FAILED"
        assert explains(local, 3, "3")
        assert explains(local, 3, "2")
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    def test_c84_other_mode_is_refused_on_both_sides(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(remote=False), make_local(remote=True)
        assert local.link(2, peer.listen_port).name == "LLM_PARAM_INVALID"
        assert peer.link(1, local.port()).name == "LLM_PARAM_INVALID"
        assert explains(local, 2, "enable_remote_cache_accessible differs")
        assert explains(peer, 1, "enable_remote_cache_accessible differs")

    def test_same_cluster_id_on_both_sides(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(1), make_local(1)
        assert local.link(1, peer.listen_port).name == "LLM_PARAM_INVALID"

    def test_live_holder_of_a_cluster_id_keeps_its_link(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        first, second, local = make_peer(2), make_peer(2), make_local()
        source = first.add_blocks(seed=100)
        cache = local.add_blocks()
        assert first.link(1, local.port()).name == "LLM_SUCCESS"
        assert second.link(1, local.port()).name == "LLM_ALREADY_LINK"
        assert pull_works(local, first, cache, source)

    @refused_by_vendor(Restriction.NO_SENTENCES)
    def test_error_is_forgotten_after_success(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        local.link(2, 1)
        assert local.link_error(2) != ""
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert local.link_error(2) == ""

    def test_c78_arguments(self, make_local: MakeLocal) -> None:
        local = make_local()
        datadist, info = local.datadist, local._info(2, 1)
        for call in (datadist.link_clusters, datadist.unlink_clusters):
            overall, statuses = call([])
            assert (overall.name, statuses) == ("LLM_PARAM_INVALID", [])
            with refused(local.api):
                call([info], 0)
            with pytest.raises(TypeError):
                call([info], "1")
            with pytest.raises(ValueError):
                call([info], 2**31)
            with pytest.raises(TypeError):
                call(info)
            with pytest.raises(TypeError):
                call([1])
            with pytest.raises(TypeError):
                call([local.api.LLMClusterInfo()])
        with pytest.raises(TypeError):
            datadist.unlink_clusters([info], 1000, 1)
        no_local = local.api.LLMClusterInfo()
        no_local.remote_cluster_id = 2
        no_local.append_remote_ip_info("127.0.0.1", 1)
        with refused(local.api):
            datadist.link_clusters([no_local])


class TestUnlinking:
    def test_c79_pull_after_unlink_and_after_relink(self, pair: Pair) -> None:
        local, peer = pair()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert local.unlink(2).name == "LLM_SUCCESS"
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        with refused(local.api, "LLM_NOT_YET_LINK"):
            peer.pull_blocks(local.api.BlocksCacheKey(1), source, [0], [0])
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert pull_works(local, peer, cache, source)

    def test_either_side_may_unlink(self, pair: Pair) -> None:
        local, peer = pair()
        assert peer.unlink(1).name == "LLM_SUCCESS"
        assert local.unlink(2).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    def test_unlinked_cluster_unlinks_again(self, make_local: MakeLocal) -> None:
        local = make_local()
        assert local.unlink(2).name == "LLM_SUCCESS"
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"

    def test_forced_unlink_makes_the_other_end_fail(self, pair: Pair) -> None:
        local, peer = pair()
        cache, source = local.add_blocks(seed=7), peer.add_blocks(seed=100)
        assert local.unlink(2, force=True).name == "LLM_SUCCESS"
        before = peer.dump(source)
        with refused(local.api, "LLM_FAILED", says="unlink_clusters(force=True)"):
            peer.pull_blocks(local.api.BlocksCacheKey(1), source, [0], [0])
        assert peer.dump(source) == before
        assert peer.link(1, local.port()).name == "LLM_ALREADY_LINK"
        assert peer.unlink(1, force=True).name == "LLM_SUCCESS"
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        assert pull_works(local, peer, cache, source)

    def test_dialling_again_replaces_what_the_listener_still_holds(self, pair: Pair) -> None:
        local, peer = pair()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        for _ in range(20):
            assert local.unlink(2, force=True).name == "LLM_SUCCESS"
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)
        assert pull_works(local, peer, cache, source)

    def test_both_sides_unlink_at_once(self, pair: Pair) -> None:
        local, peer = pair()
        for _ in range(30):
            peer.start("unlink", 1)
            mine = local.unlink(2).name
            assert (mine, peer.result().name) == ("LLM_SUCCESS", "LLM_SUCCESS")
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS", local.link_error(2)


class TestHixlBackend:
    """Each side links before it transfers; the host engine has one link for both directions."""

    @pytest.fixture
    def sides(self, make_local: MakeLocal, make_peer: MakePeer) -> tuple[Cluster, Peer]:
        return make_local(1, backend="hixl"), make_peer(2, backend="hixl")

    def test_both_sides_link_and_a_second_time_is_one_too_many(
        self, sides: tuple[Cluster, Peer]
    ) -> None:
        local, peer = sides
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_ALREADY_LINK"
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        assert peer.link(1, local.port()).name == "LLM_ALREADY_LINK"
        assert local.unlink(2).name == "LLM_SUCCESS"
        assert peer.unlink(1).name == "LLM_SUCCESS"
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    def test_both_sides_link_at_once(self, sides: tuple[Cluster, Peer]) -> None:
        local, peer = sides
        for _ in range(30):
            peer.start("link", 1, local.port())
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
            assert peer.result().name == "LLM_SUCCESS"
            local.unlink(2, force=True)
            peer.unlink(1, force=True)

    def test_without_the_backend_the_second_side_is_linked_already(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        local, peer = make_local(1), make_peer(2)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert peer.link(1, local.port()).name == "LLM_ALREADY_LINK"
