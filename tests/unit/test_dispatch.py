"""``Pusher`` with a ``Dispatcher``: one thread that writes, and what D is told when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes.clock import FakeClock, wait_for
from fakes.push_side import ONE_CACHE, OTHER_D, D, P
from fakes.threads import falls_asleep, named_thread
from fakes.write_side import FakeFence, WriteSide

from vllm_llmdd_connector.control.messages import (
    BlockSpan,
    CancelAck,
    Done,
    Failed,
    Void,
)
from vllm_llmdd_connector.errors import RemoteProtocolError

DONE = Done(transfer_id="t", reservation=1, production=7)
VOID = Void(transfer_id="t", reservation=1)
ACK = CancelAck(transfer_id="t", reservation=1)
OTHER = {"cluster_id": OTHER_D}


def span(first: int, count: int) -> tuple[BlockSpan]:
    return (BlockSpan(first=first, count=count),)


@pytest.fixture
def make_side(clock: FakeClock) -> Iterator[Callable[..., WriteSide]]:
    sides: list[WriteSide] = []

    def make(**options: Any) -> WriteSide:
        sides.append(WriteSide(clock, **options))
        return sides[-1]

    yield make
    for side in sides:
        side.close()
        assert side.device.most_at_once <= 1, "two writes at once"


@pytest.fixture
def side(make_side: Callable[..., WriteSide]) -> WriteSide:
    return make_side()


class TestTurns:
    def test_lone_prompt_goes_as_one_transfer_layer_by_layer(self, side: WriteSide) -> None:
        side.reserve()
        side.begin()
        assert falls_asleep(named_thread("llmdd-dispatch"))
        assert side.names == []
        side.pusher.layer_computed("a")
        write = side.next_write(1)
        assert (write.src_blocks, write.dst_blocks) == ([4, 5, 6], [20, 21, 22])
        side.end_writes("d0*")
        assert falls_asleep(named_thread("llmdd-dispatch"))
        assert side.names == ["d0*"]
        side.pusher.layer_computed("b")
        side.end_writes("d1*")
        assert side.wait_answers() == [DONE]

    def test_caches_with_one_tensor_a_layer_go_layer_by_layer(
        self, make_side: Callable[..., WriteSide]
    ) -> None:
        side = make_side(plans=ONE_CACHE)
        side.reserve()
        side.begin()
        side.pusher.layer_computed("a")
        side.end_writes("d0")
        side.pusher.end_step()
        side.end_writes("d1")
        assert side.wait_answers() == [DONE]

    def test_second_destination_ends_a_lone_transfer_at_its_next_layer(
        self, side: WriteSide
    ) -> None:
        side.reserve()
        side.begin()
        side.pusher.layer_computed("a")
        side.next_write(1)
        side.reserve(2, **OTHER)
        side.pusher.end_step()
        side.end_writes("d0*", "e0", "d1", "e1")
        assert {answer.reservation for answer in side.wait_answers(2)} == {1, 2}  # type: ignore[attr-defined]

    def test_transfer_that_waits_for_its_layer_gives_way(self, side: WriteSide) -> None:
        side.step(32, 4, 5)
        side.begin(40, 6)
        side.reserve(1, spans=span(2, 1), blocks=((22,),))
        side.reserve(2, spans=span(0, 2), blocks=((30, 31),), **OTHER)
        side.end_writes("e0", "e1")
        side.pusher.end_step()
        side.end_writes("d0*", "d1*")

    def test_destinations_take_turns_however_much_each_has(self, side: WriteSide) -> None:
        side.reserve(1)
        side.reserve(2)
        side.reserve(3, **OTHER)
        side.step()
        side.end_writes("d0", "e0", "d1", "e1", "d0*", "d1*")
        side.wait_answers(3)

    def test_blocks_of_several_chunks_arrive_before_done(self, side: WriteSide) -> None:
        side.reserve()
        side.step(20, 4, 5)
        side.end_writes("d0*", "d1*")
        side.step(40, 6)
        assert side.next_write(3).dst_blocks == [21, 22]
        side.end_writes("d0*")
        assert side.answers == []
        side.end_writes("d1*")
        assert side.wait_answers() == [DONE]
        wait_for(lambda: "sent_bytes" in side.stats._counts, "the count")
        assert side.figures()[0]["sent_bytes"] == 3 * 4 * 64


class TestDevice:
    @pytest.fixture(autouse=True)
    def _on_device(self, side: WriteSide) -> None:
        side.device.has_device = True
        side.device.holds = False

    def test_layer_leaves_when_the_device_has_computed_it(self, side: WriteSide) -> None:
        side.reserve()
        side.begin()
        side.pusher.layer_computed("a")
        (fence,) = side.device.fences
        assert fence.is_awaited.wait(20)
        assert side.names == []
        fence.reached.set()
        wait_for(lambda: side.names == ["d0*"], "layer a")

    def test_first_hook_of_a_layer_counts_and_records_one_event(self, side: WriteSide) -> None:
        side.reserve()
        side.begin()
        side.pusher.layer_computed("a")
        side.pusher.layer_computed("a")
        (fence,) = side.device.fences
        fence.reached.set()
        wait_for(lambda: side.names == ["d0*"], "layer a")

    def test_ready_destination_does_not_wait_for_another_one_s_device_work(
        self, side: WriteSide
    ) -> None:
        side.step(32, 4, 5)
        side.device.fences[-1].reached.set()
        side.begin(40, 6)
        side.pusher.layer_computed("a")
        with side.pusher._lock:
            side.reserve(1, spans=span(2, 1), blocks=((22,),))
            side.reserve(2, spans=span(0, 2), blocks=((30, 31),), **OTHER)
        wait_for(lambda: side.names == ["e0", "e1"], "the settled blocks")
        side.device.fences[-1].reached.set()
        wait_for(lambda: side.names[2:] == ["d0*"], "layer a")

    def test_blocks_of_an_ended_step_wait_for_the_device_too(self, side: WriteSide) -> None:
        """vLLM's step ends when its kernels are queued."""
        side.step()
        side.reserve()
        fence = side.device.fences[-1]
        assert fence.is_awaited.wait(20)
        assert side.names == []
        fence.reached.set()
        assert side.wait_answers() == [DONE]

    def test_void_while_the_device_computes_sends_nothing(self, side: WriteSide) -> None:
        side.reserve()
        side.begin()
        side.pusher.layer_computed("a")
        (fence,) = side.device.fences
        assert fence.is_awaited.wait(20)
        side.pusher.void([7])
        fence.reached.set()
        assert side.wait_answers() == [VOID]
        assert side.names == []

    def test_step_without_prompts_records_no_event(self, side: WriteSide) -> None:
        side.pusher.layer_computed("a")
        side.pusher.end_step()
        assert side.device.fences == []


class TestLastWords:
    """D may use the blocks again after them, so they wait for the write under way."""

    def test_cancel_is_acknowledged_when_the_write_has_returned(self, side: WriteSide) -> None:
        side.reserve()
        side.step()
        write = side.next_write(1)
        side.cancel()
        assert side.answers == []
        write.end()
        assert side.wait_answers() == [ACK]
        assert side.names == ["d0*"]

    def test_cancel_of_what_is_not_written_is_acknowledged_at_once(self, side: WriteSide) -> None:
        side.reserve(1)
        side.reserve(2, **OTHER)
        side.step()
        side.next_write(1)
        side.cancel(2)
        assert side.answers == [CancelAck(transfer_id="t", reservation=2)]
        side.cancel(99)
        assert len(side.answers) == 2

    def test_cancel_wakes_a_transfer_that_waits_for_its_layer(self, side: WriteSide) -> None:
        side.reserve()
        side.begin()
        assert falls_asleep(named_thread("llmdd-dispatch"))
        side.cancel()
        assert side.wait_answers() == [ACK]
        side.pusher.end_step()
        side.reserve(2)
        side.end_writes("d0*", "d1*")

    def test_void_is_told_when_the_write_has_returned_and_its_end_is_no_done(
        self, side: WriteSide
    ) -> None:
        side.reserve()
        side.step()
        side.end_writes("d0*")
        write = side.next_write(2)
        side.pusher.void([7])
        assert side.answers == []
        write.end()
        assert side.wait_answers() == [VOID]
        assert falls_asleep(named_thread("llmdd-dispatch"))
        assert side.answers == [VOID]

    def test_cancel_after_the_void_is_acknowledged_after_the_write_too(
        self, side: WriteSide
    ) -> None:
        side.reserve()
        side.step()
        write = side.next_write(1)
        side.pusher.void([7])
        side.cancel()
        assert side.answers == []
        write.end()
        assert side.wait_answers(2) == [VOID, ACK]

    def test_next_production_is_written_into_the_next_reservation(self, side: WriteSide) -> None:
        side.reserve()
        side.step(20, 4, 5)
        side.next_write(1)
        side.pusher.void([7])
        side.step(40, 1, 2, 3, production=8)
        side.reserve(2)
        side.end_writes("d0*", "d0*", "d1*")
        assert side.wait_answers(2) == [VOID, Done(transfer_id="t", reservation=2, production=8)]

    def test_cancel_all_means_everything_of_that_rank(self, side: WriteSide) -> None:
        side.reserve(1)
        side.reserve(2, **OTHER)
        side.reserve(3, transfer_id="parked")
        side.step()
        write = side.next_write(1)
        side.cancel_all(6)
        assert side.answers == []
        write.end()
        assert side.wait_answers() == [CancelAck()]
        side.begin(40, 1, 2, 3, transfer_id="parked", production=8)
        side.pusher.end_step()
        side.end_writes("e0*", "e1*")
        assert side.names == ["d0", "e0*", "e1*"]

    def test_successor_of_the_addressed_process_has_nothing_to_cancel(
        self, side: WriteSide
    ) -> None:
        side.reserve()
        side.cancel_all(6, to_cluster=P + 1)
        side.step()
        side.end_writes("d0*", "d1*")
        assert side.wait_answers(2) == [CancelAck(), DONE]

    def test_reservation_for_an_earlier_link_says_nothing_whenever_it_arrives(
        self, side: WriteSide
    ) -> None:
        """It came on a connection that D has closed since."""
        side.cancel_all(6)
        side.reserve(1)
        side.reserve(2, link_number=6)
        side.cancel_all(6)
        side.cancel_all(5)
        side.step()
        side.end_writes("d0*", "d1*")
        acks = [CancelAck()] * 3
        assert side.wait_answers(4) == [*acks, Done(transfer_id="t", reservation=2, production=7)]


class TestFailure:
    def test_first_failure_ends_everything_for_that_rank_and_nothing_for_others(
        self, side: WriteSide
    ) -> None:
        for reservation in (1, 2):
            side.reserve(reservation)
        side.reserve(3, **OTHER)
        side.reserve(4, transfer_id="parked")
        side.step()
        side.next_write(1).end("LLM_TIMEOUT")
        side.next_write(2)
        failed = side.wait_answers(3)
        assert all(isinstance(answer, Failed) and answer.link_lost for answer in failed)
        assert {answer.reservation for answer in failed} == {1, 2, 4}  # type: ignore[attr-defined]
        assert side.device.dropped == [D]
        side.end_writes("e0*", "e1*")
        done = Done(transfer_id="t", reservation=3, production=7)
        assert side.wait_answers(4)[3] == done
        assert side.names == ["d0", "e0*", "e1*"]
        assert side.figures()[1] == {"push": 3}

    @pytest.mark.parametrize("word", [ACK, VOID], ids=["cancelled", "void"])
    def test_failed_write_of_what_is_over_says_that_the_link_is_lost(
        self, side: WriteSide, word: CancelAck | Void
    ) -> None:
        """D went on over a link that P had dropped, so its next push failed."""
        side.reserve()
        side.step()
        write = side.next_write(1)
        if word == ACK:
            side.cancel()
        else:
            side.pusher.void([7])
        write.end("LLM_TIMEOUT")
        failed, last = side.wait_answers(2)
        assert isinstance(failed, Failed)
        assert (failed.reservation, failed.link_lost, last) == (1, True, word)
        assert side.device.dropped == [D]

    def test_rank_that_has_linked_again_is_served(self, side: WriteSide) -> None:
        side.reserve()
        side.step()
        side.next_write(1).end("LLM_FAILED")
        side.wait_answers()
        side.reserve(2)
        side.end_writes("d0*", "d1*")
        assert isinstance(side.wait_answers(2)[1], Done)

    def test_error_that_nobody_foresaw_fails_the_push_and_not_the_thread(
        self, side: WriteSide, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(side.device, "_write", lambda write: 1 // 0)
            side.reserve()
            side.step()
            (answer,) = side.wait_answers()
        assert isinstance(answer, Failed)
        assert "internal error" in answer.reason
        side.reserve(2)
        side.end_writes("d0*", "d1*")

    def test_device_that_cannot_be_asked_fails_the_push_and_not_the_thread(
        self, side: WriteSide, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A question for the choice of the next turn ended the thread, and D waited in vain."""
        side.device.has_device = True
        with monkeypatch.context() as patch:
            for method in ("is_done", "wait"):
                patch.setattr(FakeFence, method, lambda fence: 1 // 0)
            side.reserve(1)
            side.reserve(2, **OTHER)
            side.step()
            answers = side.wait_answers(2)
        assert all(isinstance(answer, Failed) for answer in answers)
        side.device.has_device = False
        side.step(transfer_id="u", production=8)
        side.reserve(3, transfer_id="u")
        side.end_writes("d0*", "d1*")

    def test_step_that_never_ended_fails_what_waits_for_it(self, side: WriteSide) -> None:
        side.reserve()
        side.begin(20, 4, 5)
        side.begin(40, 1, 2, 3, transfer_id="u", production=8)
        (answer,) = side.wait_answers()
        assert isinstance(answer, Failed)
        assert not answer.link_lost


class TestReserve:
    @pytest.mark.parametrize("blocks", [(), ((20, 21),), ((20, 21, 0),)], ids=str)
    def test_reserve_that_does_not_name_its_blocks_is_refused(
        self, side: WriteSide, blocks: Any
    ) -> None:
        with pytest.raises(RemoteProtocolError, match="does not name 3 blocks"):
            side.reserve(blocks=blocks)


class TestEnd:
    def test_close_waits_for_the_write_under_way_and_begins_none(self, side: WriteSide) -> None:
        side.reserve()
        side.step()
        write = side.next_write(1)
        closing = threading.Thread(target=side.pusher.close)
        closing.start()
        assert falls_asleep(closing)
        write.end()
        closing.join()
        assert side.names == ["d0*"]

    def test_idle_thread_sleeps(self, side: WriteSide) -> None:
        side.reserve()
        side.step()
        side.end_writes("d0*", "d1*")
        side.wait_answers()
        assert falls_asleep(named_thread("llmdd-dispatch"))
