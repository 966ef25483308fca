"""``Receiver``: reservations that are closed before anybody hears of their end."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fakes.receive_side import BOTH_GROUPS, DEADLINE_S, NOW_S, D, P, Side

from vllm_llmdd_connector.control.messages import (
    BlockSpan,
    CacheToken,
    Cancel,
    Done,
    Failed,
    Queued,
    Void,
)
from vllm_llmdd_connector.layout.blocks import WantedBlocks
from vllm_llmdd_connector.metadata import ReceiveJob
from vllm_llmdd_connector.worker.receive import Receive

FIRST_GROUP = [WantedBlocks([5, 6], 1), WantedBlocks([], 3)]


@pytest.fixture
def side() -> Side:
    return Side()


class TestReserve:
    def test_blocks_are_reserved_in_every_cache_before_p_is_asked(self, side: Side) -> None:
        reserve = side.begin()
        assert side.engine.open == {1: (0, [5, 6]), 2: (1, [5, 6]), 3: (2, [7])}
        assert (reserve.to_cluster, reserve.cluster_id, reserve.transfer_id) == (P, D, "t")
        assert reserve.spans == (BlockSpan(first=1, count=2), BlockSpan(first=2, count=1))
        assert reserve.tokens == tuple(
            CacheToken(model_id=model_id, token=model_id + 1) for model_id in range(3)
        )

    def test_group_without_wanted_blocks_reserves_nothing(self, side: Side) -> None:
        reserve = side.begin(groups=FIRST_GROUP)
        assert [token.model_id for token in reserve.tokens] == [0, 1]
        assert reserve.spans[1].count == 0

    def test_reservations_have_names_of_their_own(self, side: Side) -> None:
        names = {side.begin(f"r{number}").reservation for number in range(20)}
        assert len(names) == 20

    def test_reservation_that_cannot_be_opened_fails_and_leaves_none_open(self, side: Side) -> None:
        side.engine.fail_at = 1
        side.receiver.begin(
            Receive(
                ReceiveJob("r", "t", 1, ("127.0.0.1", 1), 5, (), BOTH_GROUPS, [], DEADLINE_S),
                DEADLINE_S,
                on_done=lambda done: side.log.append("done"),
                on_failed=lambda reason: side.log.append(f"failed {reason}"),
            ),
            side.dialer,
        )
        assert side.log == ["closed", "failed no room"]
        assert (side.engine.open, side.sent, len(side.receiver)) == ({}, [], 0)


class TestEnds:
    def test_done_closes_every_reservation_before_it_is_told(self, side: Side) -> None:
        side.done(side.begin())
        assert side.log == ["closed"] * 3 + ["done 7"]
        assert (side.engine.open, len(side.receiver)) == ({}, 0)

    def test_failure_closes_every_reservation_before_it_is_told(self, side: Side) -> None:
        reserve = side.begin()
        failed = Failed(transfer_id="t", reservation=reserve.reservation, reason="torn")
        side.hear(failed)
        assert side.log == ["closed"] * 3 + ["failed torn"]
        assert len(side.sent) == 1

    def test_lost_link_is_dropped_and_fails_every_push_over_it(self, side: Side) -> None:
        """It stayed as it was, and every later push over it failed."""
        reserve = side.begin("r1")
        side.begin("r2")
        number = reserve.reservation
        side.hear(Failed(transfer_id="t", reservation=number, reason="torn", link_lost=True))
        assert side.log == ["link dropped", *(["closed"] * 3 + ["failed torn"]) * 2]
        assert (side.engine.open, len(side.receiver)) == ({}, 0)

    def test_loss_of_an_earlier_link_ends_nothing_over_the_next_one(self, side: Side) -> None:
        """A failed pull had D link anew beside two pushes; P's word about the first one then took
        the new link down, with the second one and what had just been reserved over it."""
        first, _ = side.begin("r1"), side.begin("r2")
        side.link.number += 1
        side.begin("r3")
        number = first.reservation
        side.hear(Failed(transfer_id="t", reservation=number, reason="torn", link_lost=True))
        assert [line for line in side.log if line != "closed"] == ["failed torn"]
        assert len(side.receiver) == 2

    def test_void_closes_and_reserves_again_under_another_name(self, side: Side) -> None:
        first = side.begin(groups=FIRST_GROUP)
        side.hear(Void(transfer_id="t", reservation=first.reservation))
        second = side.last_reserve()
        assert second.reservation != first.reservation
        assert side.log == ["closed"] * 2
        assert [token.token for token in second.tokens] == [3, 4] == list(side.engine.open)
        side.done(second)
        assert side.log[2:] == ["closed"] * 2 + ["done 7"]

    def test_void_that_cannot_be_followed_fails(self, side: Side) -> None:
        reserve = side.begin()
        side.engine.fail_at = 2
        side.hear(Void(transfer_id="t", reservation=reserve.reservation))
        assert side.log[-1] == "failed no room"
        assert (side.engine.open, len(side.receiver)) == ({}, 0)

    def test_requests_end_each_for_itself(self, side: Side) -> None:
        first, second = side.begin("r1"), side.begin("r2")
        side.done(second, production=8)
        assert (side.log[-1], len(side.receiver), len(side.engine.open)) == ("done 8", 1, 3)
        side.done(first)
        assert side.log[-1] == "done 7"


class TestStale:
    @pytest.mark.parametrize("kind", [Done, Void, Failed])
    def test_answer_to_an_earlier_reservation_says_nothing(self, side: Side, kind: Any) -> None:
        """P had sent it before it knew that its production was void."""
        first = side.begin()
        side.hear(Void(transfer_id="t", reservation=first.reservation))
        before = (list(side.log), len(side.sent), dict(side.engine.open))
        extra: dict[Any, dict[str, Any]] = {
            Done: {"production": 7},
            Void: {},
            Failed: {"reason": "torn"},
        }
        side.hear(kind(transfer_id="t", reservation=first.reservation, **extra[kind]))
        assert (side.log, len(side.sent), side.engine.open) == before

    def test_second_done_says_nothing(self, side: Side) -> None:
        reserve = side.begin()
        side.done(reserve)
        side.done(reserve)
        assert side.log.count("done 7") == 1

    def test_answer_for_another_transfer_says_nothing(self, side: Side) -> None:
        side.done(side.begin(), transfer_id="u")
        assert side.log == []

    def test_other_messages_say_nothing(self, side: Side) -> None:
        side.begin()
        side.hear(Queued(claim_id=1))
        assert (side.log, len(side.receiver)) == ([], 1)


class TestGivingUp:
    def test_given_up_request_is_closed_told_and_cancelled_at_p(self, side: Side) -> None:
        reserve = side.begin()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        assert side.log == ["closed"] * 3 + ["failed aborted"]
        assert side.sent[-1] == Cancel(
            to_cluster=P, transfer_id="t", reservation=reserve.reservation
        )
        side.done(reserve)
        assert side.log[-1] == "failed aborted"

    def test_cancel_names_the_reservation_after_a_void(self, side: Side) -> None:
        first = side.begin()
        side.hear(Void(transfer_id="t", reservation=first.reservation))
        second = side.last_reserve()
        side.receiver.give_up("r", "aborted", side.dialer, NOW_S)
        cancel = side.sent[-1]
        assert isinstance(cancel, Cancel)
        assert cancel.reservation == second.reservation

    def test_unknown_request_is_no_error(self, side: Side) -> None:
        side.receiver.give_up("stranger", "aborted", side.dialer, NOW_S)
        assert (side.log, side.sent) == ([], [])

    def test_request_ends_at_its_deadline_and_not_before(self, side: Side) -> None:
        side.begin()
        assert side.receiver.next_event_s() == DEADLINE_S
        side.receiver.check(side.dialer, DEADLINE_S - 0.001)
        assert side.log == []
        side.receiver.check(side.dialer, DEADLINE_S)
        assert side.log == [*["closed"] * 3, "failed P did not send all blocks within 60 s"]
        assert isinstance(side.sent[-1], Cancel)
        assert side.receiver.next_event_s() == math.inf

    def test_lost_peer_fails_everything_and_is_told_nothing(self, side: Side) -> None:
        side.begin("r1")
        side.begin("r2")
        side.receiver.close("lost", NOW_S)
        assert side.log == (["closed"] * 3 + ["failed lost"]) * 2
        assert (len(side.sent), side.engine.open, len(side.receiver)) == (2, {}, 0)
