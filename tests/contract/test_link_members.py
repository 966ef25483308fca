"""The collective link(), unlink() and query_register_mem_status(); switch_role().

The numbers in the names are those of the conformance checklist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.cluster import Cluster, block_pieces, moved
from contract.errors import refused, wait_until
from contract.peer import Peer

MakeLocal = Callable[..., Cluster]
MakePeer = Callable[..., Peer]

MEMBERS = {1: 0, 2: 1}


@pytest.fixture
def name() -> str:
    """A comm name that no other test and no earlier run uses."""
    return f"comm-{uuid.uuid4()}"


def wait_for(cluster: Cluster | Peer, comm_id: int, status: str) -> None:
    wait_until(lambda: cluster.comm_status(comm_id) != "PREPARING")
    assert cluster.comm_status(comm_id) == status


def join(name: str, members: dict[int, int], *clusters: Cluster | Peer) -> list[int]:
    """All clusters link; returns their comm ids once all are OK."""
    comm_ids = [cluster.link_members(name, members) for cluster in clusters]
    for cluster, comm_id in zip(clusters, comm_ids, strict=True):
        wait_for(cluster, comm_id, "OK")
    return comm_ids


def pull_works(local: Cluster, peer: Any, cache: int, source: int) -> bool:
    local.flip_byte(cache, 0, 3)
    before = local.dump(cache)
    local.pull_blocks(local.api.BlocksCacheKey(peer.cluster_id), cache, [0], [0])
    return local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))


def sockets() -> set[str]:
    """Names at which members of this user are waiting."""
    directory = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / f"llmdd-{os.geteuid()}"
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


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
            wait_for(cluster, comm_id, "OK")
        assert pull_works(local, peer, cache, source)

    def test_other_mapping_or_name_does_not_meet(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local(link_time_s=1)
        comm_id = local.link_members(name, MEMBERS)
        peer.link_members(name, {1: 0, 2: 2})
        peer.link_members(name + "x", MEMBERS)
        wait_for(local, comm_id, "FAILED")

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
            wait_for(local, comm_id, "OK")
            wait_for(peer, comm_id, "OK")
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
                "llm.listenIpInfo": "127.0.0.1:0",
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


class TestUnlink:
    def test_c81_unlink_then_pull_and_link_again(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        for comm_id in (1, 2, 3):
            assert join(name, MEMBERS, local, peer) == [comm_id, comm_id]
            assert pull_works(local, peer, cache, source)
            for cluster in (local, peer):
                cluster.unlink_members(comm_id)
                with refused(local.api, "LLM_NOT_YET_LINK"):
                    cluster.comm_status(comm_id)
            with refused(local.api, "LLM_NOT_YET_LINK"):
                local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_c81_unlink_while_preparing(self, make_local: MakeLocal, name: str) -> None:
        before = sockets()
        local = make_local()
        comm_id = local.link_members(name, {2: 0, 1: 1})
        wait_until(lambda: sockets() > before)
        assert local.comm_status(comm_id) == "PREPARING"
        local.unlink_members(comm_id)
        with refused(local.api, "LLM_NOT_YET_LINK"):
            local.comm_status(comm_id)
        assert sockets() <= before

    def test_member_that_stays_away_fails_the_link(self, make_local: MakeLocal, name: str) -> None:
        local = make_local(link_time_s=1)
        for members in (MEMBERS, {2: 0, 1: 1}):
            comm_id = local.link_members(name, members)
            wait_for(local, comm_id, "FAILED")
            assert "did not come in time" in local.link_error(2)
            local.unlink_members(comm_id)

    def test_finalize_does_not_wait_for_a_member(self, make_local: MakeLocal, name: str) -> None:
        """Vendor: finalize then waits about 30 s."""
        local = make_local()
        local.link_members(name, MEMBERS)
        local.link_members(name, {2: 0, 1: 1})
        began = time.monotonic()
        local.finalize()
        assert time.monotonic() - began < 5

    def test_killed_member_comes_back(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        local = make_local()
        cache = local.add_blocks()
        for comm_id in (1, 2):
            peer = make_peer()
            source = peer.add_blocks(seed=100)
            assert join(name, MEMBERS, local, peer) == [comm_id, 1]
            assert pull_works(local, peer, cache, source)
            peer.kill()
            with refused(local.api, "LLM_FAILED"):
                local.pull_blocks(local.api.BlocksCacheKey(2), cache, [0], [0])

    def test_socket_of_a_killed_member_does_not_disturb(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        before = sockets()
        killed = make_peer()
        killed.link_members(name, {2: 0, 1: 1})
        wait_until(lambda: sockets() > before)
        killed.kill()
        local = make_local()
        comm_id = local.link_members(name, {2: 0, 1: 1})
        time.sleep(0.1)
        assert local.comm_status(comm_id) == "PREPARING"
        peer = make_peer()
        peer.link_members(name, {2: 0, 1: 1})
        wait_for(local, comm_id, "OK")
        wait_until(lambda: sockets() <= before)

    def test_c84_other_transfer_mode_fails_the_link(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(remote=True), make_local(remote=False)
        comm_ids = [cluster.link_members(name, MEMBERS) for cluster in (local, peer)]
        wait_for(local, comm_ids[0], "FAILED")
        wait_for(peer, comm_ids[1], "FAILED")
        assert "enable_remote_cache_accessible" in local.link_error(2)
        assert "enable_remote_cache_accessible" in peer.link_error(1)

    def test_memory_that_cannot_be_read_is_said(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.inject_probe_errno(1)
        comm_ids = [cluster.link_members(name, MEMBERS) for cluster in (local, peer)]
        wait_for(peer, comm_ids[1], "FAILED")
        wait_for(local, comm_ids[0], "FAILED")
        assert "ptrace_scope" in peer.link_error(1)

    def test_waiting_members_sleep(self, make_local: MakeLocal, name: str) -> None:
        local = make_local()
        local.link_members(name, {2: 0, 1: 1})
        time.sleep(0.5)
        before = sum(local.wake_ups().values())
        time.sleep(1)
        assert sum(local.wake_ups().values()) - before <= 30

    def test_many_cycles_leave_nothing(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()

        def cycle(comm_id: int) -> None:
            assert join(name, MEMBERS, local, peer) == [comm_id, comm_id]
            for cluster in (local, peer):
                cluster.unlink_members(comm_id)

        cycle(1)
        before = (local.descriptors(), local.native_threads(), sockets())
        for comm_id in range(2, 42):
            cycle(comm_id)
        # The last link's thread may be joined at the next call only.
        assert local.descriptors() <= before[0] + 3
        assert local.native_threads() <= before[1] + 1
        assert sockets() == before[2]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name, which pytest's own does not."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t") as directory:
        yield Path(directory)


class TestDirectory:
    def test_open_directory_is_refused(self, engine: str, short_path: Path) -> None:
        """Another user could wait there in a member's place."""
        (short_path / f"llmdd-{os.geteuid()}").mkdir(mode=0o755)
        code = f"""
import time, {engine} as api
d = api.LLMDataDist(api.LLMRole.MIX, 1)
d.init({{"llm.EnableCacheManager": "1"}})
comm = d.link("x", {{1: 0, 2: 1}}, "")
while d.query_register_mem_status(comm).name == "PREPARING":
    time.sleep(0.01)
print(d.query_register_mem_status(comm).name, d.last_link_error(2))
"""
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TMPDIR": str(short_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert run.stdout.startswith(f"FAILED link() of 'x': {short_path}/")
        assert "only this user" in run.stdout


class TestRegistrationAfterLink:
    def test_c53_default_is_not_accessible_and_true_is_refused(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        cache = local.add_blocks()
        early = peer.add_blocks(model_id=0, seed=100)
        join(name, MEMBERS, local, peer)
        peer.add_blocks(model_id=1, seed=200)
        assert pull_works(local, peer, cache, early)
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2, 1), cache, [0], [0])
        with refused(local.api):
            peer.add_blocks(accessible=True)
        with refused(local.api):
            peer.add_rows(accessible=True)
        peer.add_rows(accessible=False)

    def test_link_clusters_changes_no_default(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        assert pull_works(local, peer, cache, source)


class TestSwitchRole:
    def test_c82_reverse_link_with_the_same_caches(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local(listen=False)
        cache, source = local.add_blocks(), peer.add_blocks(seed=100)
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        assert pull_works(local, peer, cache, source)
        role = local.api.LLMRole
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(role.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
        assert local.unlink(2).name == "LLM_SUCCESS"
        local.switch_role(role.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
        peer.switch_role(role.DECODER)
        assert peer.port() == 0
        assert peer.link(1, local.port()).name == "LLM_SUCCESS"
        before = peer.dump(source)
        peer.pull_blocks(local.api.BlocksCacheKey(1), source, [4], [5])
        assert peer.dump(source) == moved(before, local.dump(cache), block_pieces([4], [5], 64))

    def test_same_role_and_same_address_change_nothing(self, make_local: MakeLocal) -> None:
        local = make_local()
        port = local.port()
        for address in ("127.0.0.1:0", f"127.0.0.1:{port}"):
            local.switch_role(local.api.LLMRole.MIX, {"llm.listenIpInfo": address})
            assert local.port() == port

    def test_address_in_use_leaves_the_old_listener(self, make_local: MakeLocal) -> None:
        local = make_local()
        port = local.port()
        with refused(local.api, "LLM_FAILED"):
            local.switch_role(local.api.LLMRole.MIX, {"llm.listenIpInfo": "192.0.2.1:0"})
        assert local.port() == port

    def test_member_of_a_link_is_linked(self, make_local: MakeLocal, name: str) -> None:
        local = make_local()
        comm_id = local.link_members(name, MEMBERS)
        with refused(local.api, "LLM_EXIST_LINK"):
            local.switch_role(local.api.LLMRole.PROMPT)
        local.unlink_members(comm_id)
        local.switch_role(local.api.LLMRole.PROMPT)

    def test_arguments(self, make_local: MakeLocal) -> None:
        local = make_local()
        role = local.api.LLMRole.MIX
        with pytest.raises(TypeError):
            local.switch_role(1)
        for wrong in ([], {"llm.listenIpInfo": 5}, {5: "x"}):
            with pytest.raises(TypeError):
                local.datadist.switch_role(role, wrong)
        with refused(local.api):
            local.switch_role(role, {"llm.listenIpInfo": "127.0.0.1"})
        with pytest.raises(ValueError):
            local.switch_role(role, {"llm.listenIpInfo": "127.0.0.1:x"})
