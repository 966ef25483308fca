"""``PeerThread`` on an engine that lets P write D's blocks: links, pulls and pushes in order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from fakes.clock import PATIENCE_S, wait_for
from fakes.pull_peer import ReleasePeer
from fakes.puller import Puller
from fakes.worker_peer import WorkerPeer

from vllm_llmdd_connector.control.messages import Cancel, CancelAll, Reserve


@pytest.fixture
def make_puller(scheduler: ReleasePeer, worker: WorkerPeer) -> Iterator[Callable[..., Puller]]:
    pullers: list[Puller] = []

    def make(takes_pushes: bool = True, **options: float) -> Puller:
        scheduler.worker_port = worker.port if takes_pushes else 0
        pullers.append(Puller(scheduler, **options))
        pullers[-1].engine.has_reservations = False
        return pullers[-1]

    yield make
    for puller in pullers:
        puller.close()


@pytest.fixture
def puller(make_puller: Callable[..., Puller]) -> Puller:
    """P has 100 ms to confirm that it has stopped."""
    return make_puller(sync_kv_timeout_ms=50, release_timeout_s=0.05)


@pytest.fixture
def patient(make_puller: Callable[..., Puller]) -> Puller:
    return make_puller()


def begin(puller: Puller, worker: WorkerPeer, claim_id: int = 1) -> tuple[str, Reserve]:
    """The first request: linked, and reserved."""
    request_id = puller.submit_receive(claim_id)
    worker.quiet()
    return request_id, worker.next(Reserve)


class TestLink:
    def test_link_is_made_when_p_writes_nothing_of_earlier_requests(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        request_id = patient.submit_receive(1)
        cancel = worker.next(CancelAll)
        assert (cancel.to_cluster, cancel.cluster_id) == (0xA, 0xD)
        assert patient.engine.calls == []
        worker.confirm_quiet()
        reserve = worker.next(Reserve)
        assert patient.engine.calls == ["link"]
        assert reserve.blocks == ((5, 6), ())
        assert reserve.link_number == cancel.link_number > 0
        worker.done(reserve)
        patient.wait_reported(request_id)
        assert patient.received == [request_id]

    def test_peer_that_does_not_confirm_is_not_linked(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id = puller.submit_receive(1)
        puller.wait_reported(request_id)
        limit = "(raise sync_kv_timeout_ms or release_timeout_s)"
        assert limit in puller.failed[request_id]
        assert puller.engine.calls == []

    def test_peer_that_takes_no_pushes_is_not_asked(
        self, scheduler: ReleasePeer, make_puller: Callable[..., Puller]
    ) -> None:
        puller = make_puller(takes_pushes=False)
        pulled = puller.submit(1)
        scheduler.ack(scheduler.next_release())
        puller.wait_reported(pulled)
        assert puller.engine.names() == ["link", "pull"]


class TestStop:
    def test_given_up_request_is_reported_when_p_has_stopped(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        request_id, _ = begin(patient, worker)
        patient.completions.cancel(request_id)
        patient.thread.give_up(request_id, "aborted")
        cancel = worker.next(Cancel)
        assert patient.completions.drain() is None
        worker.stopped(cancel)
        patient.wait_reported(request_id)
        assert patient.received == [request_id]
        assert patient.engine.calls == ["link"]

    def test_missing_answer_drops_the_link_before_the_report(
        self, puller: Puller, worker: WorkerPeer
    ) -> None:
        request_id, _ = begin(puller, worker)
        reported_first = threading.Event()

        def on_unlink() -> None:
            if puller.completions.num_waiting == 0:
                reported_first.set()

        puller.engine.on_unlink = on_unlink
        puller.thread.give_up(request_id, "claim: gone")
        puller.wait_reported(request_id)
        assert puller.failed == {request_id: "push: claim: gone"}
        assert puller.engine.calls == ["link", "unlink"]
        assert not reported_first.is_set()
        wait_for(lambda: puller.ended, "the thread's end")

    def test_lost_peer_s_link_is_dropped_before_the_report(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        request_id, _ = begin(patient, worker)
        waiting: list[int] = []
        patient.engine.on_unlink = lambda: waiting.append(patient.completions.num_waiting)
        worker.close()
        patient.wait_reported(request_id)
        assert waiting == [1]

    def test_worker_that_shuts_down_waits_for_p_s_last_word(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        request_id, _ = begin(patient, worker)
        closing = threading.Thread(target=patient.thread.close)
        closing.start()
        worker.stopped(worker.next(Cancel))
        closing.join(PATIENCE_S)
        patient.wait_reported(request_id)
        assert patient.engine.calls == ["link", "unlink"]


class TestOrder:
    def test_pull_waits_for_the_pushes_of_its_link_and_holds_back_later_ones(
        self, patient: Puller, worker: WorkerPeer, scheduler: ReleasePeer
    ) -> None:
        pushed, reserve = begin(patient, worker)
        pulled = patient.submit(2)
        later = patient.submit_receive(3)
        patient.thread.give_up("stranger", "wakes the thread")
        assert "pull" not in patient.engine.names()
        worker.done(reserve)
        patient.wait_reported(pushed)
        scheduler.ack(scheduler.next_release())
        release = scheduler.next_release()
        assert release.claim_id == 2
        scheduler.ack(release)
        worker.done(worker.next(Reserve))
        patient.wait_reported(pulled, later)
        assert patient.engine.names() == ["link", "pull"]
        assert set(patient.received) == {pushed, pulled, later}

    def test_pull_that_waits_too_long_fails_by_its_deadline(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        pushed, reserve = begin(patient, worker)
        pulled = patient.submit(2, timeout_s=0.05)
        patient.wait_reported(pulled)
        assert patient.failed[pulled].startswith("queue: its turn")
        worker.done(reserve)
        patient.wait_reported(pushed)

    def test_broken_link_is_made_anew_when_nothing_is_pushed_over_the_old_one(
        self, patient: Puller, worker: WorkerPeer
    ) -> None:
        first, reserve = begin(patient, worker)
        second = patient.submit_receive(2)
        worker.next(Reserve)
        worker.lost_link(reserve)
        patient.wait_reported(first)
        cancel = worker.next(Cancel)
        third = patient.submit_receive(3)
        assert patient.engine.calls == ["link", "unlink"]
        worker.stopped(cancel)
        patient.wait_reported(second)
        worker.quiet()
        last = worker.next(Reserve)
        assert last.link_number > reserve.link_number
        worker.done(last)
        patient.wait_reported(third)
        assert patient.engine.calls == ["link", "unlink", "link"]
        assert patient.received == [third]
