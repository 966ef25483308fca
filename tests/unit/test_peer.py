"""``PeerThread`` with a fake engine and a real control channel: each job has exactly one report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from fakes.clock import PATIENCE_S, wait_for
from fakes.pull_peer import ReleasePeer
from fakes.puller import TP_RANK, Puller, make_job

from vllm_llmdd_connector.control.messages import Release, Unknown, encode
from vllm_llmdd_connector.errors import LinkError, TransferError, TransferTimeout
from vllm_llmdd_connector.layout.blocks import GroupBlocks
from vllm_llmdd_connector.worker import pull as pull_module
from vllm_llmdd_connector.worker import releases as releases_module


@pytest.fixture(autouse=True)
def _short_resend(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pull_module, releases_module):
        monkeypatch.setattr(module, "RESEND_S", 0.02)


@pytest.fixture
def peer() -> Iterator[ReleasePeer]:
    peer = ReleasePeer()
    yield peer
    peer.close()


@pytest.fixture
def make_puller(peer: ReleasePeer) -> Iterator[Callable[..., Puller]]:
    pullers: list[Puller] = []

    def make(**options: float) -> Puller:
        pullers.append(Puller(peer, **options))
        return pullers[-1]

    yield make
    for puller in pullers:
        puller.close()


@pytest.fixture
def puller(make_puller: Callable[..., Puller]) -> Puller:
    return make_puller()


class TestSuccess:
    def test_job_is_received_once_p_confirms(self, puller: Puller, peer: ReleasePeer) -> None:
        request_id = puller.submit(7)
        release = peer.next_release()
        assert release == Release(session=5, claim_id=7, rank=TP_RANK, production=1007, secret="s")
        assert puller.completions.drain() is None
        peer.ack(release)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert puller.engine.calls == ["link", "pull 0 [1, 2]->[5, 6]"]

    def test_only_groups_with_blocks_are_pulled_and_bytes_are_counted(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        groups = [GroupBlocks([1], [2], 0), GroupBlocks([3, 4, 5], [6, 7, 8], 1)]
        request_id = puller.submit(1, groups=groups)
        peer.ack(peer.next_release())
        puller.wait_reported(request_id)
        counts, failures = puller.figures()
        assert counts == {
            "recv_bytes": 1 * 1024 * 2 + 3 * 256,
            "recv_blocks": 4,
            "recv_transfers": 2,
            "recv_requests": 1,
        }
        assert not failures

    def test_next_job_is_pulled_while_the_first_awaits_its_confirmation(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        ids = [puller.submit(claim_id) for claim_id in (1, 2)]
        releases = peer.releases_by_claim([1, 2])
        peer.ack(releases[2])
        puller.wait_reported(ids[1])
        peer.ack(releases[1])
        puller.wait_reported(*ids)
        assert puller.received == [ids[1], ids[0]]
        assert puller.engine.names() == ["link", "pull", "pull"]

    def test_release_is_sent_again_until_it_is_answered(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        request_id = puller.submit(1)
        first, second = peer.next_release(), peer.next_release()
        assert first == second
        peer.ack(second)
        puller.wait_reported(request_id)

    def test_duplicated_foreign_and_junk_answers_change_nothing(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        request_id = puller.submit(1)
        release = peer.next_release()
        peer.send(1, b"\xc1 not msgpack")
        foreign = Release(session=5, claim_id=1, rank=TP_RANK, production=9, secret="")
        peer.ack(foreign, valid=False)
        peer.send(1, encode(Unknown(session=6)))
        for _ in range(3):
            peer.ack(release)
        puller.wait_reported(request_id)
        other = puller.submit(2)
        peer.ack(peer.releases_by_claim([2])[2])
        puller.wait_reported(other)
        assert puller.received == [request_id, other]
        counts, failures = puller.figures()
        assert counts["junk_messages"] == 1
        assert not failures

    def test_copy_waits_for_the_device_s_earlier_work(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        """The job's blocks may still be read or written by kernels that were queued before it."""
        done = threading.Event()
        job = make_job(5)
        puller.completions.expect(job.request_id, [])
        assert puller.thread.submit(job, SimpleNamespace(wait=lambda: done.wait(PATIENCE_S)))
        wait_for(lambda: puller.engine.calls == ["link"], "the link")
        assert not puller.engine.pull_started.wait(0.05)
        done.set()
        peer.ack(peer.next_release())
        puller.wait_reported(job.request_id)
        assert puller.engine.names() == ["link", "pull"]


class TestFailure:
    def test_refused_release_fails_with_blocks(self, puller: Puller, peer: ReleasePeer) -> None:
        request_id = puller.submit(1)
        peer.ack(peer.next_release(), valid=False)
        wait_for(lambda: not puller.completions.num_waiting, "the report")
        drained = puller.completions.drain()
        assert drained is not None
        assert drained.failed[request_id].startswith("release: P had given the blocks up")
        assert drained.failed_blocks == {5, 6}
        assert not drained.received

    def test_no_answer_fails_by_the_release_timeout(
        self, make_puller: Callable[..., Puller], peer: ReleasePeer
    ) -> None:
        puller = make_puller(release_timeout_s=0.05)
        request_id = puller.submit(1)
        puller.wait_reported(request_id)
        assert "did not confirm in time" in puller.failed[request_id]
        assert puller.failed[request_id].endswith("within 0.05 s (raise release_timeout_s)")
        peer.ack(peer.next_release())
        other = puller.submit(2)
        peer.ack(peer.releases_by_claim([2])[2])
        puller.wait_reported(other)
        assert puller.received == [other]

    def test_link_that_fails_once_is_tried_again_and_the_job_succeeds(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        with_error = puller.engine.link_errors
        with_error.append(LinkError("starting"))
        request_id = puller.submit(1)
        peer.ack(peer.next_release())
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert puller.engine.names() == ["link", "unlink", "link", "pull"]

    def test_link_that_fails_twice_fails_all_queued_jobs_and_the_next_one_links_anew(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        warm = puller.submit(1)
        peer.ack(peer.next_release())
        puller.wait_reported(warm)
        # The first failing transfer drops the link; two more are queued before the thread goes on.
        puller.engine.pull_errors.append(TransferError("broken"))
        puller.engine.link_errors.extend([LinkError("no"), LinkError("still no")])
        queued: list[str] = []
        puller.engine.on_pull = lambda: queued.extend(puller.submit(i) for i in (3, 4))
        broken = puller.submit(2)
        wait_for(lambda: len(queued) == 2, "the jobs behind")
        puller.engine.on_pull = lambda: None
        puller.wait_reported(broken, *queued)
        assert [puller.failed[i] for i in queued] == ["link: still no"] * 2
        last = puller.submit(5)
        peer.ack(peer.releases_by_claim([5])[5])
        puller.wait_reported(last)
        assert puller.received == [warm, last]
        _, failures = puller.figures()
        assert failures == {"transfer": 1, "link": 2}

    @pytest.mark.parametrize("error", [TransferError("torn"), TransferTimeout("slow")])
    def test_failed_transfer_drops_the_link_and_sends_no_release(
        self, puller: Puller, peer: ReleasePeer, error: Exception
    ) -> None:
        puller.engine.pull_errors.append(error)
        failed = puller.submit(1)
        puller.wait_reported(failed)
        assert puller.failed == {failed: f"transfer: {error}"}
        request_id = puller.submit(2)
        assert peer.next_release().claim_id == 2
        peer.ack(peer.next_release())
        puller.wait_reported(request_id)
        assert puller.engine.names() == ["link", "pull", "unlink", "link", "pull"]

    def test_release_that_the_request_has_no_time_for_names_its_own_limit(
        self, puller: Puller
    ) -> None:
        request_id = puller.submit(1, timeout_s=0.2)
        puller.wait_reported(request_id)
        assert puller.failed[request_id].endswith("within 60 s (raise request_timeout_s)")

    def test_job_without_groups_is_failed_untried(self, puller: Puller) -> None:
        request_id = puller.submit(1, groups=[])
        puller.wait_reported(request_id)
        assert puller.failed[request_id].startswith("block map: ")
        assert puller.engine.calls == []

    def test_job_that_waited_too_long_is_failed_untried(self, puller: Puller) -> None:
        request_id = puller.submit(1, timeout_s=0.0)
        puller.wait_reported(request_id)
        assert puller.failed[request_id].startswith("queue: ")
        assert puller.engine.calls == []


class TestUnexpected:
    """Errors that nobody foresaw still end in a report: vLLM holds the blocks until then."""

    def test_engine_bug_fails_the_running_the_awaiting_and_the_queued_job(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        """The job in the engine's hands was once in no table, so it was never reported."""
        awaiting = puller.submit(1)
        peer.next_release()
        puller.engine.pull_errors.append(TypeError("incompatible arguments"))
        queued: list[str] = []
        puller.engine.on_pull = lambda: queued.append(puller.submit(3))
        running = puller.submit(2)
        wait_for(lambda: queued, "the job behind")
        puller.wait_reported(awaiting, running, *queued)
        assert set(puller.failed) == {awaiting, running, *queued}
        assert all("incompatible arguments" in reason for reason in puller.failed.values())
        wait_for(lambda: puller.ended == [puller.thread], "the thread's end")
        assert not puller.thread.submit(make_job(4))

    def test_address_that_cannot_be_dialled_fails_the_job(self, puller: Puller) -> None:
        """ZMQ refuses this one at once, which once left the job without end."""
        request_id = puller.run_first_job(("127.0.0.1", -1))
        assert puller.failed[request_id].startswith("link: cannot dial 127.0.0.1:-1: ")


class TestPeerLost:
    def test_lost_peer_fails_awaiting_jobs_at_once_and_ends_the_thread(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        request_id = puller.submit(1)
        peer.next_release()
        peer.close()
        puller.wait_reported(request_id)
        assert puller.failed[request_id].startswith("release: the control connection to 127.0.0.1")
        wait_for(lambda: puller.ended == [puller.thread], "the thread's end")
        assert puller.engine.names() == ["link", "pull", "unlink"]

    def test_no_successor_links_while_the_lost_peer_is_unlinked(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        """The old thread's unlink dropped its successor's new link to the same peer."""
        unlinking, go_on = threading.Event(), threading.Event()

        def unlink() -> None:
            unlinking.set()
            go_on.wait(PATIENCE_S)

        puller.engine.on_unlink = unlink
        puller.submit(1)
        peer.next_release()
        peer.close()
        assert unlinking.wait(PATIENCE_S)
        late = puller.submit(2)  # taken, so that the caller starts no other thread
        go_on.set()
        puller.wait_reported(late)
        assert puller.engine.names() == ["link", "pull", "unlink"]

    def test_job_for_a_peer_that_is_gone_is_failed_and_not_lost(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        peer.close()
        wait_for(lambda: len(puller.ended) == 1, "the first thread's end")
        assert not puller.thread.submit(make_job(1))
        request_id = puller.run_first_job(peer.control_address)
        assert "the control connection to 127.0.0.1" in puller.failed[request_id]

    def test_peer_lost_during_a_pull_is_found_when_the_pull_ends(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        puller.engine.on_pull = peer.close
        request_id = puller.submit(1)
        puller.wait_reported(request_id)
        assert request_id in puller.failed


class TestPeerRestarted:
    """ZMQ may reach P's successor at the same address; it knows nothing of what D has read."""

    def test_unknown_session_fails_the_job_at_once(self, puller: Puller, peer: ReleasePeer) -> None:
        request_id = puller.submit(1)
        peer.disown(peer.next_release())
        puller.wait_reported(request_id)
        assert puller.failed[request_id] == ("release: P was restarted while its blocks were read")
        assert puller.figures()[1] == {"release": 1}

    def test_every_job_of_that_session_fails_and_no_other(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        old = [puller.submit(claim_id) for claim_id in (1, 2)]
        new = puller.submit(3, session=6)
        releases = peer.releases_by_claim([1, 2, 3])
        assert [releases[claim_id].session for claim_id in (1, 2, 3)] == [5, 5, 6]
        peer.disown(releases[1])
        puller.wait_reported(*old)
        assert set(puller.failed) == set(old)
        peer.ack(releases[3])
        puller.wait_reported(new)
        assert puller.received == [new]

    def test_confirmation_after_unknown_changes_nothing(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        request_id = puller.submit(1)
        release = peer.next_release()
        peer.disown(release)
        puller.wait_reported(request_id)
        peer.ack(release)
        other = puller.submit(2, session=6)
        peer.ack(peer.releases_by_claim([2])[2])
        puller.wait_reported(other)
        assert (list(puller.failed), puller.received) == ([request_id], [other])

    def test_job_cancelled_before_is_reported_as_received(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        request_id = puller.submit(1)
        release = peer.next_release()
        puller.completions.cancel(request_id)
        peer.disown(release)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert puller.figures()[1] == {}


class TestCancelAndClose:
    def test_job_cancelled_in_the_queue_is_reported_without_a_pull(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        queued: list[str] = []

        def queue_and_cancel() -> None:
            puller.engine.on_pull = lambda: None
            queued.append(puller.submit(2))
            puller.completions.cancel(queued[0])

        puller.engine.on_pull = queue_and_cancel
        first = puller.submit(1)
        peer.ack(peer.next_release())
        wait_for(lambda: queued, "the second job")
        puller.wait_reported(first, *queued)
        assert sorted(puller.received) == [first, *queued]
        assert puller.engine.names() == ["link", "pull"]
        assert puller.figures()[1] == {}

    @pytest.mark.parametrize("valid", [True, False])
    def test_job_cancelled_while_it_is_confirmed_is_reported_as_received(
        self, puller: Puller, peer: ReleasePeer, valid: bool
    ) -> None:
        request_id = puller.submit(1)
        release = peer.next_release()
        puller.completions.cancel(request_id)
        peer.ack(release, valid)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]

    def test_close_waits_for_the_running_copy_and_fails_the_rest(
        self, puller: Puller, peer: ReleasePeer
    ) -> None:
        order: list[str] = []
        ids = [puller.submit(1)]
        peer.next_release()

        def queue_one_and_copy() -> None:
            ids.append(puller.submit(3))
            order.append("copied")

        puller.engine.on_pull = queue_one_and_copy
        ids.append(puller.submit(2))
        wait_for(lambda: order, "the second copy")
        puller.thread.close()
        order.append("closed")
        puller.wait_reported(*ids)
        assert order[-1] == "closed"
        assert set(ids) == set(puller.failed)
        puller.thread.close()
