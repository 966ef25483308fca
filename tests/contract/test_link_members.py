"""The collective link(), unlink() and query_register_mem_status(); switch_role().

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from contract.actions import MEMBERS, join, pull_works, wait_for_comm
from contract.cluster import free_port
from contract.errors import refused
from contract.fixtures import MakeLocal, MakePeer
from contract.memory import block_pieces, moved


class TestLink:
    @pytest.mark.parametrize("members", [{1: 0, 2: 1}, {2: 3, 1: 7}])
    def test_c81_two_members_pull_both_ways(
        self,
        make_local: MakeLocal,
        make_peer: MakePeer,
        name: str,
        remote: bool,
        members: dict[int, int],
    ) -> None:
        peer, local = make_peer(remote=remote, listen=False), make_local(remote=remote)
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert join(name, members, local, peer) == [1, 1]
        assert pull_works(local, peer, cache, source)
        before = peer.dump(source)
        peer.pull_blocks(local.api.BlocksCacheKey(1), source, [4], [5])
        assert peer.dump(source) == moved(before, local.dump(cache), block_pieces([4], [5], 64))

    def test_c81_four_members(self, make_local: MakeLocal, make_peer: MakePeer, name: str) -> None:
        peers = [make_peer(cluster_id, listen=False) for cluster_id in (2, 3, 4)]
        local = make_local(listen=False)
        cache = local.add_blocks()
        sources = [peer.add_blocks(seed=100 * peer.cluster_id) for peer in peers]
        join(name, {3: 0, 1: 1, 4: 2, 2: 3}, peers[2], local, peers[0], peers[1])
        for peer, source in zip(peers, sources, strict=True):
            assert pull_works(local, peer, cache, source)
        before = peers[2].dump(sources[2])
        peers[2].pull_blocks(local.api.BlocksCacheKey(2), sources[2], [0], [1])
        after = moved(before, peers[0].dump(sources[0]), block_pieces([0], [1], 64))
        assert peers[2].dump(sources[2]) == after

    def test_c81_not_ok_before_every_member_is_there(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, late = make_peer(2), make_peer(3)
        local = make_local()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        members = {1: 0, 2: 1, 3: 2}
        comm_ids = [cluster.link_members(name, members) for cluster in (local, peer)]
        key = local.api.BlocksCacheKey(2)
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert local.comm_status(comm_ids[0]) == "PREPARING"
            with refused(local.api, "LLM_NOT_YET_LINK"):
                local.pull_blocks(key, cache, [0], [0])
            time.sleep(0.02)
        late_id = late.link_members(name, members)
        for cluster, comm_id in ((local, comm_ids[0]), (peer, comm_ids[1]), (late, late_id)):
            wait_for_comm(cluster, comm_id, "OK")
        assert pull_works(local, peer, cache, source)

    def test_other_mapping_or_name_does_not_meet(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local(link_time_s=1)
        comm_id = local.link_members(name, MEMBERS)
        peer.link_members(name, {1: 0, 2: 2})
        peer.link_members(name + "x", MEMBERS)
        wait_for_comm(local, comm_id, "FAILED")

    def test_c81_ids_rise_and_a_refused_link_uses_up_none(
        self, make_local: MakeLocal, name: str
    ) -> None:
        local = make_local()
        with refused(local.api):
            local.link_members(name, {2: 0, 3: 1})
        assert [local.link_members(f"{name}-{i}", MEMBERS) for i in range(3)] == [1, 2, 3]

    def test_members_share_a_link_of_link_clusters(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        comm_ids = join(name, MEMBERS, local, peer)
        local.unlink_members(comm_ids[0])
        assert pull_works(local, peer, cache, source)  # the link was not made by link()

    def test_two_comms_of_one_pair(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        """Vendor: unlinking one of two equal comms ended transfers over both."""
        peer, local = make_peer(), make_local()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        first = join(name, MEMBERS, local, peer)
        second = join(name, {2: 0, 1: 1}, local, peer)
        assert (first, second) == ([1, 1], [2, 2])
        for cluster in (local, peer):
            cluster.unlink_members(1)
        assert pull_works(local, peer, cache, source)
        for cluster in (local, peer):
            cluster.unlink_members(2)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_comms_set_up_at_once(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        specs = [(f"{name}-{i}", MEMBERS if i % 2 else {2: 0, 1: 1}) for i in range(20)]
        for cluster, order in ((local, specs), (peer, specs[::-1])):
            for spec in order:
                cluster.link_members(*spec)
        for comm_id in range(1, 21):
            wait_for_comm(local, comm_id, "OK")
            wait_for_comm(peer, comm_id, "OK")
        cache, source = local.add_blocks(accessible=None), peer.add_blocks()
        with refused(local.api):  # registered after link(), so not accessible
            local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])
        assert source == 1


class TestArguments:
    @pytest.mark.parametrize(
        ("comm_name", "members"),
        [
            ("", MEMBERS),
            ("x" * 128, MEMBERS),
            ("x", {1: 0}),
            ("x", {1: 0, 2: 1, 3: 2, 4: 3, 5: 4}),
            ("x", {1: 1, 2: 0}),
            ("x", {1: 0, 2: 0}),
            ("x", {2: 0, 3: 1}),
        ],
    )
    def test_c81_values(self, make_local: MakeLocal, comm_name: str, members: Any) -> None:
        local = make_local()
        with refused(local.api):
            local.datadist.link(comm_name, members, "{}")

    def test_c81_types(self, make_local: MakeLocal) -> None:
        local = make_local()
        link = local.datadist.link
        wrong: list[tuple[Any, Any, Any]] = [
            (None, MEMBERS, "{}"),
            (1, MEMBERS, "{}"),
            ("x", None, "{}"),
            ("x", [1, 2], "{}"),
            ("x", {"1": 0, 2: 1}, "{}"),
            ("x", {1: "0", 2: 1}, "{}"),
            ("x", MEMBERS, None),
        ]
        for arguments in wrong:
            with pytest.raises(TypeError):
                link(*arguments)
        for members in ({-1: 0, 2: 1}, {2**64: 0, 2: 1}, {1: -1, 2: 1}, {1: 0, 2: 2**32}):
            with pytest.raises(ValueError):
                link("x", members, "{}")
        for call in (local.datadist.unlink, local.datadist.query_register_mem_status):
            with pytest.raises(TypeError):
                call("1")

    def test_c81_rank_table_is_not_read(self, make_local: MakeLocal, name: str) -> None:
        assert make_local().datadist.link(name, MEMBERS, "x") == 1

    def test_c81_unknown_ids(self, make_local: MakeLocal) -> None:
        local = make_local()
        for call in (local.unlink_members, local.comm_status):
            with refused(local.api, "LLM_NOT_YET_LINK"):
                call(7)

    def test_hixl_backend_has_none_of_it(self, api: Any) -> None:
        datadist = api.LLMDataDist(api.LLMRole.MIX, 1)
        datadist.init(
            {
                "llm.EnableCacheManager": "1",
                "llm.TransferBackend": "hixl",
                "llm.listenIpInfo": f"127.0.0.1:{free_port()}",
            }
        )
        calls: list[Callable[[], object]] = [
            lambda: datadist.link("x", MEMBERS, "{}"),
            lambda: datadist.unlink(1),
            lambda: datadist.query_register_mem_status(1),
            lambda: datadist.switch_role(api.LLMRole.PROMPT),
        ]
        for call in calls:
            with refused(api, "LLM_FEATURE_NOT_ENABLED"):
                call()
        datadist.finalize()
