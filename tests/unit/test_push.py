"""``Pusher``: what is started when, and that ``Done`` says the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.clock import FakeClock, wait_for
from fakes.push_side import OTHER_D, TWO_CACHES, D, P, PushSide
from fakes.threads import falls_asleep

from vllm_llmdd_connector.control.messages import (
    BlockSpan,
    CacheToken,
    CancelAck,
    Done,
    Failed,
    Renew,
    Void,
)
from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.worker import senders
from vllm_llmdd_connector.worker.senders import MAX_STARTED

DONE = Done(transfer_id="t", reservation=1, production=7)
VOID = Void(transfer_id="t", reservation=1)


@pytest.fixture
def make_side(clock: FakeClock) -> Iterator[Callable[..., PushSide]]:
    sides: list[PushSide] = []

    def make(**options: Any) -> PushSide:
        sides.append(PushSide(clock, **options))
        return sides[-1]

    yield make
    for side in sides:
        side.close()


@pytest.fixture
def side(make_side: Callable[..., PushSide]) -> PushSide:
    return make_side()


class TestStart:
    def test_chunk_is_started_when_its_step_begins_and_waits_for_its_layers(
        self, side: PushSide
    ) -> None:
        side.reserve()
        side.begin(20, 4, 5)
        (task,) = side.tasks
        assert (task.cluster_id, task.token) == (D, 100)
        assert (task.src_blocks, task.dst_positions) == ([4], [0])
        step = task.synchronizer.step
        assert step.marks == [False, False]
        side.pusher.layer_computed("a")
        assert step.marks == [True, False]
        side.pusher.end_step()
        assert step.marks == [True, True]

    def test_reserve_in_the_middle_of_a_forward_starts_at_once(self, side: PushSide) -> None:
        side.begin()
        side.pusher.layer_computed("a")
        side.reserve()
        assert side.tasks[0].synchronizer.marked == [True, False]

    def test_reserve_after_the_forward_waits_for_no_layer(self, side: PushSide) -> None:
        side.step()
        side.reserve()
        assert side.tasks[0].synchronizer.marked == [True, True]

    def test_earlier_step_s_blocks_do_not_wait_for_the_running_forward(
        self, side: PushSide
    ) -> None:
        side.step(32, 4, 5)
        side.begin(40, 6)
        side.reserve()
        settled, running = side.tasks
        assert (settled.src_blocks, settled.synchronizer.marked) == ([4, 5], [True, True])
        assert (running.src_blocks, running.synchronizer.marked) == ([6], [False, False])

    def test_every_cache_has_a_transfer_with_its_token(
        self, make_side: Callable[..., PushSide]
    ) -> None:
        side = make_side(plans=TWO_CACHES)
        side.reserve()
        side.step()
        assert [(task.plan.model_id, task.token) for task in side.tasks] == [(0, 100), (1, 101)]

    def test_step_without_work_begins_nothing(self, side: PushSide) -> None:
        side.reserve()
        side.pusher.layer_computed("a")
        side.pusher.end_step()
        assert side.tasks == []


class TestDone:
    def test_s26_wrong_output_none_since_done_comes_last(
        self, make_side: Callable[..., PushSide]
    ) -> None:
        side = make_side(plans=TWO_CACHES)
        side.reserve()
        side.step(20, 4, 5)
        side.step(40, 6)
        assert len(side.tasks) == 4
        for task in side.tasks[:3]:
            task.end()
        wait_for(lambda: side.senders[D]._started[0].task is side.tasks[3], "three ends")
        assert side.answers == []
        side.tasks[3].end()
        assert side.wait_answers() == [DONE]
        wait_for(lambda: "sent_bytes" in side.stats._counts, "the count")
        counts, failures = side.figures()
        assert counts == {"sent_transfers": 4, "sent_requests": 1, "sent_bytes": 3 * 3 * 64}
        assert failures == {}

    def test_all_that_was_ordered_so_far_is_not_all(self, side: PushSide) -> None:
        side.reserve()
        side.step(20, 4, 5)
        side.tasks[0].end()
        wait_for(lambda: not side.senders[D]._started, "the end")
        assert side.answers == []
        side.step(40, 6)
        side.tasks[1].end()
        assert side.wait_answers() == [DONE]

    def test_each_d_has_its_own_done(self, side: PushSide) -> None:
        side.reserve(1)
        side.reserve(2, cluster_id=OTHER_D)
        side.step()
        first, second = side.tasks
        second.end()
        assert side.wait_answers() == [Done(transfer_id="t", reservation=2, production=7)]
        first.end()
        assert side.wait_answers(2)[1] == DONE

    def test_repeated_reserve_sends_nothing_again(self, side: PushSide) -> None:
        side.step()
        side.reserve()
        side.reserve()
        side.tasks[0].end()
        side.wait_answers()
        side.reserve()
        assert len(side.tasks) == 1


class TestVoid:
    def test_void_of_what_is_under_way_is_told_and_its_end_is_no_done(self, side: PushSide) -> None:
        side.reserve()
        side.step()
        side.pusher.void([7])
        assert side.answers == [VOID]
        side.tasks[0].end()
        wait_for(lambda: not side.senders[D]._started, "the end")
        assert side.answers == [VOID]

    def test_void_after_done_says_nothing(self, side: PushSide) -> None:
        side.reserve()
        side.step()
        side.tasks[0].end()
        side.wait_answers()
        side.pusher.void([7, 8])
        assert side.answers == [DONE]

    def test_void_and_done_are_decided_under_one_lock(self, side: PushSide) -> None:
        """An end that is seen while the void is applied waits for it, and comes too late."""
        side.reserve()
        side.step()
        piece = side.senders[D]._started[0]
        with side.pusher._lock:
            side.tasks[0].end()
            assert falls_asleep(side.threads(D)[0])
            assert not piece.order.reservation.is_over
            lost = side.pusher._plan.void(7)
        assert [reservation.message.reservation for reservation in lost] == [1]
        wait_for(lambda: not side.senders[D]._started, "the end")
        assert side.answers == []

    def test_next_production_is_pushed_into_the_next_reservation(self, side: PushSide) -> None:
        side.reserve(1)
        side.step(20, 4, 5)
        side.pusher.void([7])
        side.reserve(2)
        side.step(40, 1, 2, 3, production=8)
        for task in side.tasks:
            task.end()
        done = Done(transfer_id="t", reservation=2, production=8)
        assert side.wait_answers(2) == [VOID, done]
        assert (side.tasks[1].src_blocks, side.tasks[1].dst_positions) == ([1, 2, 3], [0, 1, 2])


class TestFailure:
    def test_failed_transfer_is_told_once_with_its_status(
        self, make_side: Callable[..., PushSide]
    ) -> None:
        side = make_side(plans=TWO_CACHES)
        side.reserve()
        side.step()
        for task in side.tasks:
            task.end("LLM_TIMEOUT: a layer was not there within 1 s")
        (answer,) = side.wait_answers()
        assert isinstance(answer, Failed)
        assert (answer.transfer_id, answer.reservation) == ("t", 1)
        assert "LLM_TIMEOUT" in answer.reason
        assert answer.link_lost
        wait_for(lambda: not side.senders[D]._started, "both ends")
        assert len(side.answers) == 1
        assert side.figures()[1] == {"push": 1}

    def test_nothing_more_is_sent_after_a_failure(self, side: PushSide) -> None:
        side.reserve()
        side.step(20, 4, 5)
        side.tasks[0].end("LLM_FAILED")
        side.wait_answers()
        side.step(40, 6)
        assert len(side.tasks) == 1

    def test_transfer_that_does_not_start_is_told(self, side: PushSide) -> None:
        side.engine.start_error = "not linked"
        side.reserve()
        side.step()
        failed = Failed(transfer_id="t", reservation=1, reason="not linked")
        assert side.answers == [failed]

    def test_withdrawn_reservation_is_no_failure(self, side: PushSide) -> None:
        """D has closed it; its Cancel is still on the way."""
        side.reserve()
        side.step(20, 4, 5)
        side.tasks[0].end("LLM_KV_CACHE_NOT_EXIST")
        wait_for(lambda: not side.senders[D]._started, "the end")
        side.step(40, 6)
        assert len(side.tasks) == 1
        assert (side.answers, side.figures()[1]) == ([], {})

    def test_step_that_never_ended_fails_what_waits_for_it(self, side: PushSide) -> None:
        side.reserve(1)
        side.begin(20, 4, 5)
        side.reserve(2, transfer_id="u")
        chunk = {"transfer_id": "u", "production": 8}
        side.step(40, 1, 2, 3, **chunk)
        (answer,) = side.answers
        assert isinstance(answer, Failed)
        assert (answer.reservation, answer.reason) == (
            1,
            "the forward that computes it did not end",
        )
        first, second = side.tasks
        first.end("LLM_PARAM_INVALID")
        second.end()
        done = Done(transfer_id="u", reservation=2, production=8)
        assert side.wait_answers(2)[1] == done


class TestCancel:
    def test_cancelled_reservation_is_acknowledged_and_sent_nothing_more(
        self, side: PushSide
    ) -> None:
        side.reserve()
        side.step(20, 4, 5)
        side.cancel()
        side.step(40, 6)
        side.tasks[0].end()
        wait_for(lambda: not side.senders[D]._started, "the end")
        ack = CancelAck(transfer_id="t", reservation=1)
        assert (len(side.tasks), side.answers) == (1, [ack])

    def test_cancelled_transfers_that_wait_are_not_started(self, side: PushSide) -> None:
        for number in range(MAX_STARTED + 1):
            side.reserve(number)
        side.step()
        side.cancel(MAX_STARTED)
        for task in list(side.tasks):
            task.end()
        side.wait_answers(MAX_STARTED + 1)
        assert len(side.tasks) == MAX_STARTED


class TestBounds:
    def test_transfers_to_one_d_are_started_up_to_a_bound(self, side: PushSide) -> None:
        for number in range(MAX_STARTED + 3):
            side.reserve(number)
        side.step()
        assert len(side.tasks) == MAX_STARTED
        side.tasks[0].end()
        wait_for(lambda: len(side.tasks) == MAX_STARTED + 1, "the next transfer")
        for task in side.tasks[1:3]:
            task.end()
        wait_for(lambda: len(side.tasks) == MAX_STARTED + 3, "the last transfers")

    def test_full_d_does_not_hold_back_another(self, side: PushSide) -> None:
        for number in range(MAX_STARTED + 1):
            side.reserve(number)
        side.reserve(99, cluster_id=OTHER_D)
        side.step()
        assert [task.cluster_id for task in side.tasks].count(OTHER_D) == 1


class TestThreads:
    def test_thread_without_work_sleeps_then_ends_and_another_one_is_begun(
        self, side: PushSide, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        side.reserve()
        side.step()
        (thread,) = side.threads(D)
        assert falls_asleep(thread)
        monkeypatch.setattr(senders, "IDLE_S", 0.01)
        side.tasks[0].end()
        wait_for(lambda: not thread.is_alive(), "the thread's end")
        assert side.senders == {}
        monkeypatch.undo()
        side.reserve(2)
        side.tasks[1].end()
        assert len(side.wait_answers(2)) == 2

    def test_closed_pusher_starts_nothing_and_its_threads_end_with_the_engine(
        self, side: PushSide
    ) -> None:
        for number in range(MAX_STARTED + 1):
            side.reserve(number)
        side.step()
        side.pusher.close()
        for task in list(side.tasks):
            task.end("LLM_FAILED")
        wait_for(lambda: not side.threads(), "the threads' ends")
        assert len(side.tasks) == MAX_STARTED


class TestMessages:
    @pytest.mark.parametrize("name", ["reserve", "cancel"])
    def test_message_for_another_process_is_refused(self, side: PushSide, name: str) -> None:
        """ZMQ has reached a successor at the same address."""
        with pytest.raises(RemoteProtocolError, match=f"{name.title()} for cluster b"):
            getattr(side, name)(to_cluster=P + 1)

    def test_message_for_a_scheduler_is_refused(self, side: PushSide) -> None:
        with pytest.raises(RemoteProtocolError, match="Renew is not for a prefill worker"):
            side.pusher.handle(Renew(session=1, claim_ids=()), side.answers.append)

    @pytest.mark.parametrize(
        "changes",
        [
            {"tokens": ()},
            {"tokens": (CacheToken(model_id=1, token=1),)},
            {"spans": ()},
        ],
        ids=str,
    )
    def test_incomplete_reserve_is_refused_and_reserves_nothing(
        self, side: PushSide, changes: dict[str, Any]
    ) -> None:
        side.step()
        with pytest.raises(RemoteProtocolError, match="Reserve "):
            side.reserve(**changes)
        assert (side.tasks, side.threads()) == ([], [])

    def test_group_without_wanted_blocks_needs_no_token(self, side: PushSide) -> None:
        side.reserve(spans=(BlockSpan(first=0, count=0),), tokens=())
        side.step()
        assert side.tasks == []
