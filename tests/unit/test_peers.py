"""Which peers a rank of D keeps, and which thread ends for want of work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fakes.clock import wait_for
from fakes.pull_peer import ReleasePeer
from fakes.puller import Puller, make_job

from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.metadata import Job
from vllm_llmdd_connector.worker import peers as peers_module
from vllm_llmdd_connector.worker.backend import Fence
from vllm_llmdd_connector.worker.peers import MAX_PEERS, Peer, Peers


class FakePeer:
    """Takes jobs until it has ended."""

    def __init__(self, endpoint: WorkerEndpoint, on_end: Callable[[Peer], None]) -> None:
        self.endpoint = endpoint
        self.used_s = 0.0
        self.is_busy = False
        self.has_ended = False
        self.jobs: list[str] = []
        self.unwanted: list[str] = []
        self._on_end = on_end

    def start(self) -> None:
        assert self.jobs, "a peer is started with its first job"

    def submit(self, job: Job, fence: Fence | None = None) -> bool:
        if not self.has_ended:
            self.jobs.append(job.request_id)
        return not self.has_ended

    def give_up(self, request_id: str, reason: str) -> None:
        self.unwanted.append(request_id)

    def retire(self) -> bool:
        if not self.is_busy:
            self.has_ended = True
        return self.has_ended

    def close(self) -> None:
        self.has_ended = True

    def end(self) -> None:
        self._on_end(self)


class Rank:
    """``Peers`` and every peer that was made."""

    def __init__(self) -> None:
        self.made: list[FakePeer] = []
        self.peers = Peers(self._make)
        self._num_jobs = 0

    def _make(
        self,
        endpoint: WorkerEndpoint,
        control_address: tuple[str, int],
        on_end: Callable[[Peer], None],
    ) -> Peer:
        self.made.append(FakePeer(endpoint, on_end))
        return self.made[-1]

    def start(self, cluster_id: int) -> FakePeer:
        """One job for a cluster; returns who has it."""
        self._num_jobs += 1
        job = make_job(self._num_jobs)
        self.peers.start(job, endpoint_of(cluster_id), None)
        (taker,) = [peer for peer in self.made if job.request_id in peer.jobs[-1:]]
        return taker


def endpoint_of(cluster_id: int) -> WorkerEndpoint:
    return WorkerEndpoint(cluster_id=cluster_id, host="127.0.0.1", engine_port=1, control_port=1)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Keeps three peers."""
    monkeypatch.setattr(peers_module, "MAX_PEERS", 3)
    return Rank()


class TestPeers:
    def test_a_peer_serves_all_its_jobs(self, rank: Rank) -> None:
        assert rank.start(1) is rank.start(1)
        assert rank.start(2) is not rank.start(1)
        assert len(rank.peers) == 2

    def test_one_that_has_ended_is_made_anew_and_its_end_is_not_that_of_the_new_one(
        self, rank: Rank
    ) -> None:
        first = rank.start(1)
        first.close()
        second = rank.start(1)
        assert second is not first
        first.end()
        assert list(rank.peers) == [second]
        second.end()
        assert len(rank.peers) == 0

    def test_what_is_not_wanted_is_told_to_all(self, rank: Rank) -> None:
        both = [rank.start(1), rank.start(2)]
        rank.peers.give_up("r", "aborted")
        assert [peer.unwanted for peer in both] == [["r"], ["r"]]


class TestTooMany:
    def test_the_one_used_longest_ago_ends(self, rank: Rank) -> None:
        for cluster_id, used_s in ((1, 5.0), (2, 3.0), (3, 4.0)):
            rank.start(cluster_id).used_s = used_s
        rank.start(4)
        assert [peer.has_ended for peer in rank.made] == [False, True, False, False]

    def test_one_that_is_busy_stays(self, rank: Rank) -> None:
        for cluster_id, used_s in ((1, 5.0), (2, 3.0), (3, 4.0)):
            peer = rank.start(cluster_id)
            peer.used_s, peer.is_busy = used_s, cluster_id == 2
        rank.start(4)
        assert [peer.has_ended for peer in rank.made] == [False, False, True, False]

    def test_nobody_ends_while_all_are_busy(self, rank: Rank) -> None:
        for cluster_id in (1, 2, 3):
            rank.start(cluster_id).is_busy = True
        rank.start(4)
        assert not any(peer.has_ended for peer in rank.made)

    def test_no_room_is_needed_for_a_known_peer(self, rank: Rank) -> None:
        for cluster_id in (1, 2, 3, 1, 2, 3):
            rank.start(cluster_id)
        assert not any(peer.has_ended for peer in rank.made)

    def test_the_engine_has_room_for_those_that_are_ending(self) -> None:
        assert MAX_PEERS < 512


@pytest.fixture
def peer() -> Iterator[ReleasePeer]:
    peer = ReleasePeer()
    yield peer
    peer.close()


@pytest.fixture
def puller(peer: ReleasePeer) -> Iterator[Puller]:
    puller = Puller(peer)
    yield puller
    puller.close()


def serve_one(puller: Puller, peer: ReleasePeer, claim_id: int) -> None:
    request_id = puller.submit(claim_id)
    peer.ack(peer.next_release())
    puller.wait_reported(request_id)


class TestThread:
    def test_retired_it_unlinks_and_ends(self, puller: Puller, peer: ReleasePeer) -> None:
        serve_one(puller, peer, 1)
        assert puller.thread.retire()
        wait_for(lambda: puller.ended, "the thread's end")
        assert puller.engine.names()[-1] == "unlink"
        assert not puller.thread.submit(make_job(2))

    def test_with_a_job_it_does_not_retire(self, puller: Puller, peer: ReleasePeer) -> None:
        request_id = puller.submit(1)
        release = peer.next_release()
        assert not puller.thread.retire()
        peer.ack(release)
        puller.wait_reported(request_id)
        serve_one(puller, peer, 2)
        assert "unlink" not in puller.engine.names()

    def test_a_job_that_comes_while_it_unlinks_is_served_over_a_new_link(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        serve_one(puller, peer, 1)
        late: list[str] = []

        def submit_late() -> None:
            puller.engine.on_unlink = lambda: None
            late.append(puller.submit(2))

        puller.engine.on_unlink = submit_late
        assert puller.thread.retire()
        peer.ack(peer.next_release())
        wait_for(lambda: late, "the late job")
        puller.wait_reported(*late)
        assert [name for name in puller.engine.names() if "link" in name] == [
            "link",
            "unlink",
            "link",
        ]
        assert not puller.ended

    def test_unused_for_long_it_ends_by_itself(
        self, puller: Puller, peer: ReleasePeer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("vllm_llmdd_connector.worker.peer.PEER_IDLE_S", 0.01)
        serve_one(puller, peer, 1)
        wait_for(lambda: puller.ended, "the thread's end")
        assert puller.engine.names()[-1] == "unlink"
