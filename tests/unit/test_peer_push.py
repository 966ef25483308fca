"""``PeerThread`` with pushes: D reserves, P's worker answers, D lets P use its blocks again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes.clock import PATIENCE_S, wait_for
from fakes.pull_peer import ReleasePeer
from fakes.puller import TP_RANK, Puller
from fakes.worker_peer import WorkerPeer

from vllm_llmdd_connector.control.messages import Cancel, Release, Reserve
from vllm_llmdd_connector.errors import LinkError
from vllm_llmdd_connector.layout.blocks import WantedBlocks

OPENED = ["link", "open 0 [5, 6]"]


@pytest.fixture
def make_puller(scheduler: ReleasePeer, worker: WorkerPeer) -> Iterator[Callable[..., Puller]]:
    pullers: list[Puller] = []

    def make(**options: float) -> Puller:
        scheduler.worker_port = worker.port
        pullers.append(Puller(scheduler, **options))
        return pullers[-1]

    yield make
    for puller in pullers:
        puller.close()
        assert puller.engine.open_tokens == [], "a reservation outlived its thread"


@pytest.fixture
def puller(make_puller: Callable[..., Puller]) -> Puller:
    return make_puller()


class TestSuccess:
    def test_request_is_received_when_its_push_is_done_and_p_is_told(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer
    ) -> None:
        request_id = puller.submit_receive(7)
        reserve = worker.next(Reserve)
        assert (reserve.to_cluster, reserve.transfer_id) == (0xA, "transfer7")
        assert puller.engine.calls == OPENED
        assert puller.completions.drain() is None
        worker.done(reserve, production=9)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert puller.engine.calls == [*OPENED, "close 1"]
        release = Release(session=5, claim_id=7, rank=TP_RANK, production=9, secret="transfer7")
        assert scheduler.next_release() == release
        counts, failures = puller.figures()
        assert counts == {"recv_bytes": 2 * 1024 * 2, "recv_blocks": 2, "recv_requests": 1}
        assert failures == {}

    def test_release_that_p_refuses_or_never_answers_is_no_failure(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer
    ) -> None:
        """``Done`` was P's word that it held the blocks all the time."""
        first = puller.submit_receive(1)
        worker.done(worker.next(Reserve))
        scheduler.ack(scheduler.next_release(), valid=False)
        second = puller.submit_receive(2)
        worker.done(worker.next(Reserve))
        puller.wait_reported(first, second)
        assert set(puller.received) == {first, second}
        assert puller.figures()[1] == {}

    def test_void_is_followed_by_another_reservation(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1)
        first = worker.next(Reserve)
        worker.void(first)
        second = worker.next(Reserve)
        assert second.reservation != first.reservation
        worker.done(second)
        puller.wait_reported(request_id)
        assert puller.received == [request_id]

    def test_pull_is_served_while_a_push_is_under_way(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer
    ) -> None:
        pushed = puller.submit_receive(1)
        reserve = worker.next(Reserve)
        pulled = puller.submit(2)
        scheduler.ack(scheduler.next_release())
        puller.wait_reported(pulled)
        assert puller.received == [pulled]
        worker.done(reserve)
        puller.wait_reported(pushed)


class TestFailure:
    def test_failure_at_p_is_reported_with_its_reason(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1)
        worker.failed(worker.next(Reserve), "torn")
        puller.wait_reported(request_id)
        assert puller.failed == {request_id: "push: torn"}
        assert puller.figures()[1] == {"push": 1}

    def test_request_ends_by_its_deadline_and_is_cancelled_at_p(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1, timeout_s=0.2)
        reserve = worker.next(Reserve)
        puller.wait_reported(request_id)
        limit = "within 60 s (raise request_timeout_s)"
        assert puller.failed[request_id] == f"push: P did not send all blocks {limit}"
        assert worker.next(Cancel).reservation == reserve.reservation

    def test_peer_that_cannot_be_linked_fails_the_request(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        puller.engine.link_errors = [LinkError("refused"), LinkError("refused")]
        request_id = puller.submit_receive(1)
        puller.wait_reported(request_id)
        assert puller.failed == {request_id: "link: refused"}

    def test_table_that_did_not_fit_is_failed_without_a_reservation(self, puller: Puller) -> None:
        request_id = puller.submit_receive(1, groups=[])
        puller.wait_reported(request_id)
        assert puller.failed[request_id].startswith("block map: ")
        assert puller.engine.calls == []

    @pytest.mark.parametrize("who", ["worker", "scheduler"])
    def test_lost_peer_fails_every_push_and_ends_the_thread(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer, who: str
    ) -> None:
        names = [puller.submit_receive(number) for number in (1, 2)]
        for _ in names:
            worker.next(Reserve)
        lost: WorkerPeer | ReleasePeer = worker if who == "worker" else scheduler
        lost.close()
        puller.wait_reported(*names)
        assert set(puller.failed) == set(names)
        wait_for(lambda: puller.ended, "the thread's end")
        assert puller.engine.names()[-3:] == ["unlink", "close", "close"]

    def test_worker_s_words_from_the_scheduler_s_address_count_nothing(
        self, puller: Puller, worker: WorkerPeer, scheduler: ReleasePeer
    ) -> None:
        """Only the rank that pushes knows that it is done."""
        pushed, pulled = puller.submit_receive(1), puller.submit(2)
        reserve = worker.next(Reserve)
        release = scheduler.next_release()
        scheduler.send(2, worker.done_frame(reserve))
        scheduler.ack(release)
        puller.wait_reported(pulled)
        assert puller.received == [pulled]
        worker.done(reserve)
        puller.wait_reported(pushed)


class TestGiveUp:
    def test_unwanted_push_is_closed_reported_and_cancelled_at_p(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1)
        reserve = worker.next(Reserve)
        puller.thread.give_up(request_id, "claim: gone")
        puller.wait_reported(request_id)
        assert puller.failed == {request_id: "push: claim: gone"}
        assert puller.engine.calls == [*OPENED, "close 1"]
        assert worker.next(Cancel).reservation == reserve.reservation
        assert puller.figures()[1] == {"push": 1}

    def test_aborted_push_is_reported_as_received(self, puller: Puller, worker: WorkerPeer) -> None:
        request_id = puller.submit_receive(1)
        worker.next(Reserve)
        puller.completions.cancel(request_id)
        puller.thread.give_up(request_id, "aborted")
        puller.wait_reported(request_id)
        assert puller.received == [request_id]
        assert puller.figures()[1] == {}

    def test_request_of_another_peer_or_one_that_is_over_is_no_error(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1)
        worker.done(worker.next(Reserve))
        puller.wait_reported(request_id)
        puller.thread.give_up(request_id, "late")
        puller.thread.give_up("stranger", "late")
        other = puller.submit_receive(2)
        worker.done(worker.next(Reserve))
        puller.wait_reported(other)
        assert set(puller.received) == {request_id, other}

    def test_unwanted_request_in_the_queue_is_never_reserved(
        self, puller: Puller, worker: WorkerPeer, gate: threading.Event
    ) -> None:
        first = puller.submit(1)
        assert puller.engine.pull_started.wait(PATIENCE_S)
        queued = puller.submit_receive(2)
        puller.thread.give_up(queued, "aborted")
        gate.set()
        puller.wait_reported(queued)
        assert puller.failed == {queued: "queue: aborted"}
        assert "open" not in puller.engine.names()
        assert first not in puller.failed


@pytest.fixture
def gate(puller: Puller) -> threading.Event:
    puller.engine.pull_gate = threading.Event()
    return puller.engine.pull_gate


def test_groups_without_wanted_blocks_are_not_reserved(puller: Puller, worker: WorkerPeer) -> None:
    groups = [WantedBlocks([], 3), WantedBlocks([8], 2)]
    request_id = puller.submit_receive(1, groups=groups)
    reserve = worker.next(Reserve)
    assert [(span.first, span.count) for span in reserve.spans] == [(3, 0), (2, 1)]
    assert puller.engine.calls[-1] == "open 1 [8]"
    worker.done(reserve)
    puller.wait_reported(request_id)
