"""``HandoverTable``: P's rendezvous with D's, whoever comes first, and its gate."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.rendezvous import CONTACT_S, LEASE_S, MAX_UNRESERVED, Rendezvous, make_lease

from vllm_llmdd_connector.control.messages import Admitted, Gone, Queued
from vllm_llmdd_connector.deadlines import SWEEP_S
from vllm_llmdd_connector.scheduler import handover as handover_module
from vllm_llmdd_connector.scheduler.handover import (
    MAX_SUITORS,
    Gate,
    HandoverState,
)
from vllm_llmdd_connector.scheduler.lease import LeaseEnd


@pytest.fixture
def meeting() -> Rendezvous:
    return Rendezvous()


class TestMeeting:
    def test_d_first_is_queued_when_p_s_request_comes_and_called_when_it_is_admitted(
        self, meeting: Rendezvous
    ) -> None:
        handover = meeting.announce()
        assert handover is not None
        assert (handover.state, meeting.kinds()) == (HandoverState.AWAITED, [])
        assert meeting.arrive() is handover
        assert (handover.state, meeting.kinds()) == (HandoverState.QUEUED, [Queued])
        assert meeting.gate(handover) is Gate.GO
        assert handover.state is HandoverState.ADMITTED
        assert meeting.kinds() == [Queued, Admitted]

    def test_p_first_answers_according_to_how_far_it_is(self, meeting: Rendezvous) -> None:
        handover = meeting.arrive()
        meeting.announce(1)
        assert meeting.kinds(1) == [Queued]
        meeting.gate(handover)
        meeting.announce(2)
        assert meeting.kinds(2) == [Admitted]
        meeting.table.computed(handover, make_lease())
        meeting.announce(3)
        assert meeting.kinds(3) == [Admitted]

    def test_d_that_takes_no_push_waits_for_its_grant(self, meeting: Rendezvous) -> None:
        handover = meeting.arrive()
        meeting.announce(1, takes_push=False)
        meeting.announce(2)
        meeting.gate(handover)
        assert meeting.kinds(1) == [Queued]
        assert meeting.kinds(2) == [Queued, Admitted]
        granted = meeting.table.computed(handover, make_lease())
        assert [suitor.claim_id for suitor in granted] == [1]

    def test_engine_without_reservations_grants_everybody(self) -> None:
        meeting = Rendezvous(can_push=False)
        meeting.announce()
        handover = meeting.admitted()
        assert meeting.kinds() == [Queued]
        granted = meeting.table.computed(handover, make_lease())
        assert [suitor.claim_id for suitor in granted] == [1]

    def test_second_request_of_a_transfer_id_is_refused(self, meeting: Rendezvous) -> None:
        first = meeting.arrive()
        assert meeting.table.arrive("t", "other", 40, "h", 0.0) is None
        assert meeting.table.of_request("r") is first
        assert meeting.table.of_request("other") is None

    def test_transfer_id_is_free_again_after_the_end(self, meeting: Rendezvous) -> None:
        meeting.table.end(meeting.arrive(), "")
        assert meeting.arrive(request_id="again").request_id == "again"

    @pytest.mark.parametrize("d_is_first", [True, False])
    @pytest.mark.parametrize("changes", [{"num_tokens": 41}, {"prompt_hash": "other"}], ids=str)
    def test_other_prompt_is_gone_and_does_not_count_as_a_d(
        self, meeting: Rendezvous, changes: dict[str, Any], d_is_first: bool
    ) -> None:
        if d_is_first:
            meeting.announce(**changes)
        handover = meeting.arrive()
        if not d_is_first:
            meeting.announce(**changes)
        assert meeting.kinds() == [Gone]
        assert handover.suitors == {}
        assert not meeting.table.renew(1, 0.0)

    def test_right_d_is_kept_where_another_one_has_another_prompt(
        self, meeting: Rendezvous
    ) -> None:
        meeting.announce(1, prompt_hash="other")
        meeting.announce(2)
        assert list(meeting.arrive().suitors) == [2]
        assert (meeting.kinds(1), meeting.kinds(2)) == ([Gone], [Queued])


class TestRepetition:
    """The network may double messages; ``has_blocks`` comes as a second announcement."""

    def test_repeated_announcement_is_answered_alike(self, meeting: Rendezvous) -> None:
        meeting.admitted()
        for _ in range(3):
            meeting.announce()
        assert meeting.kinds() == [Admitted] * 3
        assert meeting.table.of_request("r") is not None

    def test_late_first_announcement_does_not_take_back_the_blocks(
        self, meeting: Rendezvous
    ) -> None:
        """Reordered, the first one says that D has none; it has."""
        handover = meeting.arrive()
        meeting.announce(has_blocks=True)
        meeting.announce(has_blocks=False)
        assert handover.is_reserved

    def test_answers_go_where_the_last_announcement_came_from(self, meeting: Rendezvous) -> None:
        """D has dialled again; its old connection reads nothing."""
        meeting.announce()
        old = meeting.answers.pop(1)
        meeting.announce()
        meeting.arrive()
        assert (old, meeting.kinds()) == ([], [Queued])

    def test_claim_of_another_transfer_is_not_answered_and_leaves_nothing(
        self, meeting: Rendezvous
    ) -> None:
        """Such a transfer had no D, so no silence of a D ever ended it."""
        first = meeting.announce(1, "t")
        assert meeting.announce(1, "another") is None
        assert len(meeting.table) == 1
        assert first is not None
        assert list(first.suitors) == [1]

    def test_drop_of_a_dropped_or_unknown_claim_changes_nothing(self, meeting: Rendezvous) -> None:
        meeting.announce(1)
        handover = meeting.arrive()
        meeting.table.drop("t", 1)
        meeting.table.drop("t", 1)
        assert meeting.table.drop("unknown", 1) is None
        assert handover.was_dropped
        meeting.announce(2)
        meeting.table.drop("t", 1)
        assert not handover.was_dropped


class TestGate:
    def test_first_prompt_without_a_d_always_goes(self, meeting: Rendezvous) -> None:
        assert meeting.gate(meeting.arrive(), MAX_UNRESERVED + 1) is Gate.GO

    def test_prompts_without_blocks_at_a_d_go_up_to_their_share(self, meeting: Rendezvous) -> None:
        meeting.admitted("a", "a", 4)
        meeting.admitted("b", "b", 6)
        assert meeting.gate(meeting.arrive("c", "c"), 1) is Gate.WAIT

    def test_prompt_for_which_a_d_has_blocks_goes_and_takes_no_share(
        self, meeting: Rendezvous
    ) -> None:
        meeting.admitted("a", "a", 4)
        meeting.announce(1, "b", has_blocks=True)
        meeting.admitted("b", "b", 100)
        meeting.admitted("c", "c", 6)
        assert meeting.gate(meeting.arrive("d", "d"), 1) is Gate.WAIT

    def test_d_s_blocks_open_the_gate_and_give_the_share_back(self, meeting: Rendezvous) -> None:
        """No circle: what waits here waits for a D, which was called and needs no more of P."""
        meeting.admitted("a", "a", 10)
        waiting = meeting.arrive("b", "b")
        meeting.announce(2, "b")
        assert meeting.gate(waiting) is Gate.WAIT
        assert meeting.kinds(2) == [Queued, Admitted]
        meeting.announce(2, "b", has_blocks=True)
        assert meeting.gate(waiting) is Gate.GO
        other = meeting.arrive("c", "c")
        assert meeting.gate(other) is Gate.WAIT
        meeting.announce(1, "a", has_blocks=True)
        assert meeting.gate(other) is Gate.GO

    def test_waiting_d_is_called_once_however_often_vllm_asks(self, meeting: Rendezvous) -> None:
        meeting.admitted("a", "a", 10)
        waiting = meeting.arrive("b", "b")
        meeting.announce(2, "b")
        for _ in range(3):
            assert meeting.gate(waiting) is Gate.WAIT
        assert meeting.kinds(2) == [Queued, Admitted]

    def test_d_without_pushes_never_makes_p_wait(self, meeting: Rendezvous) -> None:
        """It takes blocks only when there is a lease; P would wait for D and D for P."""
        meeting.admitted("a", "a", 10)
        meeting.announce(2, "b", takes_push=False)
        assert meeting.gate(meeting.arrive("b", "b")) is Gate.GO

    def test_engine_without_reservations_lets_everything_through(self) -> None:
        meeting = Rendezvous(can_push=False)
        for name in "abc":
            meeting.admitted(name, name, 10)

    def test_share_is_free_again_when_its_prompt_has_ended(self, meeting: Rendezvous) -> None:
        first = meeting.admitted("a", "a", 10)
        waiting = meeting.arrive("b", "b")
        assert meeting.gate(waiting) is Gate.WAIT
        meeting.table.end(first, "")
        assert meeting.gate(waiting) is Gate.GO

    def test_leased_prompt_without_a_d_still_takes_its_share(self, meeting: Rendezvous) -> None:
        meeting.computed(transfer_id="a", request_id="a", num_blocks=10)
        assert meeting.gate(meeting.arrive("b", "b")) is Gate.WAIT

    def test_prompt_that_no_d_asks_for_is_computed_plainly_after_a_while(
        self, meeting: Rendezvous
    ) -> None:
        meeting.admitted("a", "a", 10)
        waiting = meeting.arrive("b", "b")
        meeting.now_s = CONTACT_S - 0.001
        assert meeting.gate(waiting) is Gate.WAIT
        meeting.now_s = CONTACT_S
        assert meeting.gate(waiting) is Gate.PLAIN

    def test_prompt_that_a_d_waits_for_is_not_computed_plainly(self, meeting: Rendezvous) -> None:
        meeting.admitted("a", "a", 10)
        waiting = meeting.arrive("b", "b")
        meeting.announce(2, "b")
        meeting.now_s = 10 * CONTACT_S
        assert meeting.gate(waiting) is Gate.WAIT

    def test_admitted_prompt_is_never_held_back_again(self, meeting: Rendezvous) -> None:
        handover = meeting.admitted("a", "a", 10)
        meeting.admitted("b", "b", 0)
        assert meeting.gate(handover, 100) is Gate.GO


class TestEnd:
    def test_awaited_transfer_is_gone_when_its_last_d_drops_it(self, meeting: Rendezvous) -> None:
        meeting.announce(1)
        meeting.announce(2)
        meeting.table.drop("t", 1)
        assert len(meeting.table) == 1
        meeting.table.drop("t", 2)
        assert len(meeting.table) == 0
        assert (meeting.kinds(1), meeting.kinds(2)) == ([], [])

    def test_whoever_waits_is_told_the_reason(self, meeting: Rendezvous) -> None:
        handover = meeting.arrive()
        meeting.announce()
        meeting.table.end(handover, "aborted")
        assert meeting.answers[1][-1] == Gone(claim_id=1, reason="aborted")
        assert (len(meeting.table), meeting.table.of_request("r")) == (0, None)
        assert not meeting.table.renew(1, 0.0)

    def test_silent_d_is_forgotten_and_a_renewed_one_is_not(self, meeting: Rendezvous) -> None:
        handover = meeting.arrive()
        meeting.announce(1)
        meeting.announce(2)
        meeting.now_s = LEASE_S / 2
        assert meeting.table.renew(2, meeting.now_s)
        meeting.table.sweep(LEASE_S)
        assert list(handover.suitors) == [2]
        assert not meeting.table.renew(1, LEASE_S)

    def test_transfer_that_only_silent_d_s_await_is_gone(self, meeting: Rendezvous) -> None:
        meeting.announce()
        meeting.table.sweep(LEASE_S - 0.001)
        assert len(meeting.table) == 1
        meeting.table.sweep(LEASE_S + SWEEP_S)
        assert len(meeting.table) == 0

    def test_sweep_leaves_a_leased_transfer_to_its_lease(self, meeting: Rendezvous) -> None:
        handover = meeting.arrive()
        meeting.announce()
        meeting.gate(handover)
        handover.lease = make_lease()
        meeting.table.sweep(10 * LEASE_S)
        assert list(handover.suitors) == [1]

    def test_announcement_of_an_ended_lease_is_gone(self, meeting: Rendezvous) -> None:
        """Its blocks may be given back at any moment: D would reserve or read for nothing."""
        handover = meeting.computed()
        assert handover.lease is not None
        handover.lease.end = LeaseEnd.RELEASED
        assert meeting.announce() is None
        assert meeting.kinds() == [Gone]
        assert handover.suitors == {}


class TestReleaseBeforeLease:
    """D has all it wants before P has computed the last chunk, which adds nothing for it."""

    def test_release_is_confirmed_and_the_last_rank_s_drops_the_claim(
        self, meeting: Rendezvous
    ) -> None:
        meeting.announce()
        handover = meeting.admitted()
        assert meeting.table.release("t", 1, 0, num_ranks=2)
        assert handover.suitors[1].ranks_released == {0}
        assert meeting.table.release("t", 1, 0, num_ranks=2)
        assert not handover.was_dropped
        assert meeting.table.release("t", 1, 1, num_ranks=2)
        assert handover.was_dropped
        assert meeting.table.release("t", 1, 1, num_ranks=2)

    def test_release_beside_a_lease_is_the_lease_s(self, meeting: Rendezvous) -> None:
        """It may be of a computation that was preempted; the claim stays open for other ranks."""
        meeting.announce()
        handover = meeting.computed()
        assert meeting.table.release("t", 1, 0, num_ranks=1) is handover
        assert handover.suitors[1].ranks_released == set()

    @pytest.mark.parametrize("reach", [Rendezvous.announce, Rendezvous.arrive])
    def test_release_in_another_state_is_not_known(self, meeting: Rendezvous, reach: Any) -> None:
        reach(meeting)
        assert not meeting.table.release("t", 1, 0, num_ranks=1)

    def test_release_of_an_unknown_transfer_is_not_known(self, meeting: Rendezvous) -> None:
        assert not meeting.table.release("t", 1, 0, num_ranks=1)


class TestBounds:
    def test_d_s_of_one_transfer_are_bounded(self, meeting: Rendezvous) -> None:
        meeting.arrive()
        for claim_id in range(1, MAX_SUITORS + 1):
            assert meeting.announce(claim_id) is not None
        assert meeting.announce(MAX_SUITORS + 1) is None
        assert meeting.kinds(MAX_SUITORS + 1) == []
        assert meeting.announce(1) is not None

    def test_awaited_transfers_are_bounded_and_p_s_requests_come_through(
        self, meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover_module, "MAX_HANDOVERS", 2)
        meeting.announce(1, "a")
        meeting.announce(2, "b")
        assert meeting.announce(3, "c") is None
        assert meeting.announce(4, "a") is not None
        meeting.arrive("c", "c")
        assert meeting.announce(3, "c") is not None

    def test_silent_d_s_make_room(
        self, meeting: Rendezvous, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handover_module, "MAX_HANDOVERS", 1)
        meeting.announce(1, "a")
        meeting.now_s = LEASE_S
        assert meeting.announce(2, "b") is not None
