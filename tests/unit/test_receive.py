"""``Receiver``: reservations that are closed before anybody hears of their end."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import (
    BlockSpan,
    CacheToken,
    Cancel,
    Done,
    Failed,
    Message,
    Queued,
    Reserve,
    Void,
)
from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.metadata import ReceiveJob
from vllm_llmdd_connector.scheduler.block_map import WantedBlocks
from vllm_llmdd_connector.worker.receive import Receive, Receiver

P, D = 0xA, 0xD
DEADLINE_S = 60.0
PLANS = [
    CachePlan(0, 0, 100, 64, (Region("a", 0, 64, ("a",)),)),
    CachePlan(1, 0, 100, 32, (Region("b", 0, 32, ("b",)),)),
    CachePlan(2, 1, 100, 64, (Region("c", 0, 64, ("c",)),)),
]
BOTH_GROUPS = [WantedBlocks([5, 6], 1), WantedBlocks([7], 2)]
FIRST_GROUP = [WantedBlocks([5, 6], 1), WantedBlocks([], 3)]


class RecordingEngine:
    """Tokens count up; ``log`` keeps the order of everything that a test looks at."""

    cluster_id = D

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._last_token = 0
        self.open: dict[int, tuple[int, list[int]]] = {}
        self.fail_at = -1
        """Opening a reservation of this cache fails."""

    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int:
        if plan.model_id == self.fail_at:
            raise TransferError("no room")
        self._last_token += 1
        self.open[self._last_token] = (plan.model_id, blocks)
        return self._last_token

    def close_reservation(self, token: int) -> None:
        del self.open[token]
        self._log.append("closed")


class RecordingDialer:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, messages: list[Message]) -> None:
        self.sent.extend(messages)


class Side:
    """One ``Receiver`` and what it did."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.engine = RecordingEngine(self.log)
        self.receiver = Receiver(self.engine, PLANS, P)
        self._dialer = RecordingDialer()
        self.dialer = cast(Dialer, self._dialer)

    def begin(self, request_id: str = "r", **changes: Any) -> Reserve:
        fields = {
            "request_id": request_id,
            "transfer_id": "t",
            "claim_id": 1,
            "control_address": ("127.0.0.1", 1),
            "session": 5,
            "workers": (),
            "groups": BOTH_GROUPS,
            "loaded_blocks": [],
            "timeout_s": DEADLINE_S,
        }
        job = ReceiveJob(**{**fields, **changes})
        receive = Receive(
            job,
            DEADLINE_S,
            on_done=lambda production: self.log.append(f"done {production}"),
            on_failed=lambda reason: self.log.append(f"failed {reason}"),
        )
        self.receiver.begin(receive, self.dialer)
        return self.last_reserve()

    def last_reserve(self) -> Reserve:
        return [message for message in self.sent if isinstance(message, Reserve)][-1]

    @property
    def sent(self) -> list[Message]:
        return self._dialer.sent

    def hear(self, message: Any) -> None:
        self.receiver.on_message(message, self.dialer)

    def done(self, reserve: Reserve, **changes: Any) -> None:
        fields = {"transfer_id": "t", "reservation": reserve.reservation, "production": 7}
        self.hear(Done(**{**fields, **changes}))


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
                on_done=lambda production: side.log.append("done"),
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
        side.receiver.give_up("r", "aborted", side.dialer)
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
        side.receiver.give_up("r", "aborted", side.dialer)
        cancel = side.sent[-1]
        assert isinstance(cancel, Cancel)
        assert cancel.reservation == second.reservation

    def test_unknown_request_is_no_error(self, side: Side) -> None:
        side.receiver.give_up("stranger", "aborted", side.dialer)
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
        side.receiver.close("lost")
        assert side.log == (["closed"] * 3 + ["failed lost"]) * 2
        assert (len(side.sent), side.engine.open, len(side.receiver)) == (2, {}, 0)
