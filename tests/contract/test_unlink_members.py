"""unlink() of a collective link, members that stay away, die or cannot meet; late registration."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.actions import MEMBERS, join, pull_works, wait_for_comm
from contract.engines import Restriction, refused_by_vendor
from contract.errors import explains, refused, wait_until
from contract.fixtures import MakeLocal, MakePeer


def sockets() -> set[str]:
    """Names at which members of this user are waiting."""
    directory = Path(os.environ.get("TMPDIR", tempfile.gettempdir())) / f"llmdd-{os.geteuid()}"
    return {path.name for path in directory.iterdir()} if directory.exists() else set()


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
            wait_for_comm(local, comm_id, "FAILED")
            assert explains(local, 2, "did not come in time")
            local.unlink_members(comm_id)

    def test_finalize_does_not_wait_for_a_member(self, make_local: MakeLocal, name: str) -> None:
        """Vendor: finalize then waits about 30 s."""
        local = make_local(link_time_s=600)
        local.link_members(name, MEMBERS)
        local.link_members(name, {2: 0, 1: 1})
        local.finalize()  # link_total_time is longer than a test may take

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
        wait_for_comm(local, comm_id, "OK")
        wait_until(lambda: sockets() <= before)

    def test_c84_other_transfer_mode_fails_the_link(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(remote=True), make_local(remote=False)
        comm_ids = [cluster.link_members(name, MEMBERS) for cluster in (local, peer)]
        wait_for_comm(local, comm_ids[0], "FAILED")
        wait_for_comm(peer, comm_ids[1], "FAILED")
        assert explains(local, 2, "enable_remote_cache_accessible")
        assert explains(peer, 1, "enable_remote_cache_accessible")

    @pytest.mark.within_a_host
    def test_memory_that_cannot_be_read_is_said(
        self, make_local: MakeLocal, make_peer: MakePeer, name: str
    ) -> None:
        peer, local = make_peer(), make_local()
        peer.inject_probe_errno(1)
        comm_ids = [cluster.link_members(name, MEMBERS) for cluster in (local, peer)]
        wait_for_comm(peer, comm_ids[1], "FAILED")
        wait_for_comm(local, comm_ids[0], "FAILED")
        assert explains(peer, 1, "ptrace_scope")

    def test_waiting_members_sleep(self, make_local: MakeLocal, name: str) -> None:
        local = make_local()
        local.link_members(name, {2: 0, 1: 1})
        time.sleep(0.5)
        before = sum(local.wake_ups().values())
        time.sleep(1)
        assert sum(local.wake_ups().values()) - before <= 30

    def test_c87_many_cycles_leave_nothing(
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
    @refused_by_vendor(Restriction.NO_SENTENCES)
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

    @refused_by_vendor(Restriction.REGISTER_FIRST)
    def test_link_clusters_changes_no_default(
        self, make_local: MakeLocal, make_peer: MakePeer
    ) -> None:
        peer, local = make_peer(), make_local()
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"
        source, cache = peer.add_blocks(seed=100), local.add_blocks()
        assert pull_works(local, peer, cache, source)
