"""``Receiver`` on an engine without reservations: P's last word comes before any report."""

from __future__ import annotations

import math

import pytest
from fakes.receive_side import CANCEL_TIMEOUT_S, DEADLINE_S, LINK_NUMBER, NOW_S, P, Side

from vllm_llmdd_connector.control.messages import (
    Cancel,
    CancelAck,
    Done,
    Failed,
    Message,
    Reserve,
    Void,
)


@pytest.fixture
def side() -> Side:
    return Side(has_reservations=False)


def failed(reserve: Reserve, link_lost: bool = False) -> Failed:
    number = reserve.reservation
    return Failed(transfer_id="t", reservation=number, reason="torn", link_lost=link_lost)


def ack(reserve: Reserve) -> CancelAck:
    return CancelAck(transfer_id="t", reservation=reserve.reservation)


def test_reserve_names_d_s_blocks_by_group(side: Side) -> None:
    reserve = side.begin()
    assert (reserve.blocks, reserve.tokens) == (((5, 6), (7,)), ())
    assert reserve.link_number == LINK_NUMBER
    assert side.engine.open == {}


def test_done_is_told_at_once(side: Side) -> None:
    side.done(side.begin())
    assert side.log == ["done 7"]


def test_void_is_followed_by_another_reservation_of_the_same_blocks(side: Side) -> None:
    first = side.begin()
    side.hear(Void(transfer_id="t", reservation=first.reservation))
    second = side.last_reserve()
    assert second.reservation != first.reservation
    assert second.blocks == first.blocks
    side.done(first)
    assert side.log == []
    side.done(second)
    assert side.log == ["done 7"]


class TestGivingUp:
    @pytest.mark.parametrize("word", ["ack", "failed", "void", "done"])
    def test_request_is_told_after_p_s_last_word(self, side: Side, word: str) -> None:
        """P's answer to something else may have been on its way; it has stopped then, too."""
        reserve = side.begin()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        number = reserve.reservation
        assert side.log == []
        assert side.sent[-1] == Cancel(to_cluster=P, transfer_id="t", reservation=number)
        words: dict[str, Message] = {
            "ack": ack(reserve),
            "failed": failed(reserve),
            "void": Void(transfer_id="t", reservation=number),
            "done": Done(transfer_id="t", reservation=number, production=7),
        }
        side.hear(words[word])
        assert (side.log, len(side.receiver)) == (["failed aborted"], 0)
        assert len(side.sent) == 2

    def test_second_reason_changes_nothing(self, side: Side) -> None:
        reserve = side.begin()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        side.receiver.give_up("r", "again", side.dialer, NOW_S + 1)
        assert len(side.sent) == 2
        assert side.receiver.next_event_s() == NOW_S + CANCEL_TIMEOUT_S
        side.hear(ack(reserve))
        assert side.log == ["failed aborted"]

    def test_missing_answer_means_that_the_peer_is_lost(self, side: Side) -> None:
        side.begin()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        late_s = NOW_S + CANCEL_TIMEOUT_S
        assert side.receiver.check(side.dialer, late_s - 0.001) == ""
        assert "did not confirm within 9 s" in side.receiver.check(side.dialer, late_s)
        assert side.log == []
        side.receiver.close("lost", late_s)
        assert side.log == ["failed aborted"]

    def test_late_request_is_cancelled_and_its_answer_awaited(self, side: Side) -> None:
        reserve = side.begin()
        assert side.receiver.check(side.dialer, DEADLINE_S) == ""
        assert (side.log, side.receiver.next_event_s()) == ([], DEADLINE_S + CANCEL_TIMEOUT_S)
        side.hear(ack(reserve))
        assert side.log == ["failed P did not send all blocks within 60 s"]
        assert side.receiver.next_event_s() == math.inf

    def test_acknowledgement_that_nobody_asked_for_says_nothing(self, side: Side) -> None:
        reserve = side.begin()
        side.hear(ack(reserve))
        assert (side.log, len(side.receiver)) == ([], 1)


class TestLostLink:
    def test_link_is_dropped_before_the_report_and_others_are_cancelled(self, side: Side) -> None:
        first, second = side.begin("r1"), side.begin("r2")
        side.hear(failed(first, link_lost=True))
        assert side.log == ["link dropped", "failed torn"]
        cancel = side.sent[-1]
        assert isinstance(cancel, Cancel)
        assert cancel.reservation == second.reservation
        side.hear(failed(second, link_lost=True))
        assert side.log == ["link dropped", "failed torn", "failed torn"]

    def test_failure_of_something_else_keeps_the_link(self, side: Side) -> None:
        side.hear(failed(side.begin()))
        assert side.log == ["failed torn"]

    def test_link_is_dropped_for_a_request_that_was_given_up_too(self, side: Side) -> None:
        """P's word was on its way when D gave up; P has dropped its end, so the next push over
        this link would fail."""
        reserve = side.begin()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        side.hear(failed(reserve, link_lost=True))
        assert side.log == ["link dropped", "failed aborted"]
