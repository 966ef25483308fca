"""``Producer`` of prompts that a D was told of in advance: who is called, granted and let go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.meeting import BLOCKS, Meeting
from fakes.prefiller import LEASE_S

from vllm_llmdd_connector.control.messages import Admitted, Gone, Grant, Queued
from vllm_llmdd_connector.layout.groups import Group
from vllm_llmdd_connector.metadata import PrefillChunk, SentPrompt
from vllm_llmdd_connector.params import read_ticket


@pytest.fixture
def meeting(clock: FakeClock) -> Iterator[Meeting]:
    """At the end nothing may be left but what a lease or a D of the test's own holds."""
    meeting = Meeting(clock)
    yield meeting
    clock.advance(10 * LEASE_S)
    meeting.p.message()
    assert meeting.p.producer.num_leases == 0
    assert sorted(meeting.pool.touched) == sorted(meeting.pool.freed)


class TestChunks:
    def test_workers_are_told_of_each_chunk_under_one_production(self, meeting: Meeting) -> None:
        request = meeting.arrive()
        first = meeting.schedule(request, 20)
        assert first.chunks == [PrefillChunk("t", 1, 40, (BLOCKS,), 20)]
        last = meeting.go_on(request, 20, 40)
        assert last.chunks == [PrefillChunk("t", 1, 40, ((),), 40)]
        assert meeting.go_on(request, 40, 41).is_empty

    def test_request_without_a_transfer_id_is_not_followed(self, meeting: Meeting) -> None:
        request = meeting.arrive(transfer_id=None)
        assert meeting.schedule(request).is_empty
        assert meeting.finish(request) is not None

    @pytest.mark.parametrize("transfer_id", ["", "x" * 513, "a\nb", 7])
    def test_bad_transfer_id_is_counted_and_the_prompt_is_a_plain_prefill(
        self, meeting: Meeting, transfer_id: Any
    ) -> None:
        request = meeting.arrive(transfer_id=transfer_id)
        assert meeting.p.counts() == {"not_handed_over": 1}
        assert meeting.schedule(request).is_empty
        assert meeting.finish(request) is None

    def test_second_request_of_a_transfer_id_is_a_plain_prefill(self, meeting: Meeting) -> None:
        """``n`` choices at P have one transfer id."""
        meeting.arrive("p0")
        second = meeting.arrive("p1")
        assert meeting.schedule(second).is_empty
        assert meeting.num_handovers == 1
        assert meeting.finish(second) is None


class TestLease:
    def test_lease_holds_the_blocks_from_the_last_chunk_on(self, meeting: Meeting) -> None:
        request = meeting.arrive()
        meeting.schedule(request, 20)
        assert meeting.pool.touched == []
        meeting.go_on(request, 20, 40)
        assert meeting.pool.touched == [4, 5, 6]
        params = meeting.finish(request)
        assert params is not None
        ticket = read_ticket(params)
        assert (ticket.production, ticket.secret) == (1, "t")
        assert meeting.pool.in_use == [4, 5, 6]
        assert meeting.p.counts() == {"leases_opened": 1}

    def test_released_lease_ends_and_the_workers_forget_the_production(
        self, meeting: Meeting
    ) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.release()
        step = meeting.p.message()
        assert step.voids == [1]
        assert meeting.pool.ref_counts(BLOCKS) == [1, 1, 1]
        assert meeting.num_handovers == 0
        assert meeting.p.message().voids == []

    def test_prompt_fetched_before_its_request_ends_is_not_held_again(
        self, meeting: Meeting
    ) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        meeting.release()
        meeting.p.message()
        assert meeting.finish(request) is None
        assert meeting.pool.in_use == []

    def test_every_rank_has_to_release(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, num_ranks=2)
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request, 20)
        assert not meeting.release(rank=0)  # nothing is held yet
        meeting.go_on(request, 20, 40)
        assert meeting.p.producer.num_leases == 1
        assert meeting.release(rank=1)
        assert meeting.p.message().voids == [1]

    def test_d_that_has_all_before_the_last_chunk_needs_no_lease(self, meeting: Meeting) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request, 20)
        assert not meeting.release()  # nothing is held yet
        meeting.go_on(request, 20, 40)
        assert meeting.pool.touched == []
        assert meeting.finish(request) is None
        assert meeting.p.message().voids == [1]
        assert meeting.num_handovers == 0

    def test_expired_lease_is_told_to_whoever_still_waits(
        self, meeting: Meeting, clock: FakeClock
    ) -> None:
        meeting.announce()
        request = meeting.arrive()
        meeting.schedule(request)
        clock.advance(LEASE_S)
        assert meeting.p.message().voids == [1]
        gone = Gone(claim_id=1, reason="the lease has expired")
        assert meeting.answers[1][-1] == gone
        assert meeting.p.counts()["leases_expired"] == 1

    def test_renewed_claim_keeps_the_lease(self, meeting: Meeting, clock: FakeClock) -> None:
        meeting.announce()
        meeting.schedule(meeting.arrive())
        for _ in range(3):
            clock.advance(LEASE_S / 2)
            assert meeting.p.renew(1) == []
            assert meeting.p.message().voids == []

    def test_only_blocks_that_are_still_in_the_window_are_held(self, clock: FakeClock) -> None:
        window = Group(0, "SlidingWindowSpec", 16, ("layer0",), window=16)
        meeting = Meeting(clock, groups=(window,))
        meeting.schedule(meeting.arrive())
        assert meeting.pool.touched == [5, 6]

    def test_prompt_whose_blocks_have_left_the_window_is_granted_from_its_lease(
        self, clock: FakeClock
    ) -> None:
        """P went on generating; vLLM's own table has holes only, the lease has the blocks."""
        window = Group(0, "SlidingWindowSpec", 16, ("layer0",), window=16)
        meeting = Meeting(clock, groups=(window,))
        meeting.announce(takes_push=False)
        request = meeting.arrive()
        meeting.schedule(request)
        request.status.name = "FINISHED_STOPPED"
        params = meeting.p.producer.request_finished(request, [(0, 0, 0)])
        assert params is not None
        grant = Grant(claim_id=1, production=1, secret="t", block_ids=((0, 5, 6),))
        assert meeting.answers[1][-1] == grant

    def test_prompt_without_blocks_or_lease_leaves_nothing_behind(self, clock: FakeClock) -> None:
        """Its transfer id was never free again, and counted as unreserved for ever."""
        window = Group(0, "SlidingWindowSpec", 16, ("layer0",), window=16)
        meeting = Meeting(clock, groups=(window,))
        meeting.announce()
        request = meeting.arrive()
        meeting.drop()
        meeting.schedule(request)
        request.status.name = "FINISHED_STOPPED"
        assert meeting.p.producer.request_finished(request, [(0, 0, 0)]) is None
        assert meeting.num_handovers == 0
        assert meeting.p.message().voids == [1]


class TestCap:
    def test_reserved_prompt_is_held_whatever_others_hold(self, clock: FakeClock) -> None:
        """Its D has the room already and takes it at once."""
        meeting = Meeting(clock, max_leased_fraction=0.03, unreserved_fraction=1.0)
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        meeting.announce(has_blocks=True)
        meeting.schedule(meeting.arrive())
        assert meeting.p.producer.num_leases == 2

    def test_invited_d_can_count_on_the_blocks_whatever_others_hold(self, clock: FakeClock) -> None:
        """It may have allocated its own already, and the word of that may be on the way."""
        meeting = Meeting(clock, max_leased_fraction=0.03, unreserved_fraction=1.0)
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        meeting.announce()
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.p.producer.num_leases == 2
        assert meeting.finish(request) is not None
        assert meeting.kinds() == [Queued, Admitted]

    def test_prompt_to_be_pulled_over_the_cap_is_given_up_when_it_ends(
        self, clock: FakeClock
    ) -> None:
        meeting = Meeting(clock, max_leased_fraction=0.03, unreserved_fraction=1.0)
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        meeting.announce(takes_push=False)
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.p.producer.num_leases == 1
        assert meeting.finish(request) is None
        assert meeting.kinds() == [Queued, Gone]
        assert meeting.p.counts() == {"leases_opened": 1, "leases_over_cap": 1}
        assert meeting.p.message().voids == [2]

    def test_prompt_held_back_by_the_cap_is_held_when_there_is_room_at_its_end(
        self, clock: FakeClock
    ) -> None:
        meeting = Meeting(clock, max_leased_fraction=0.03, unreserved_fraction=1.0)
        other = meeting.arrive("q", "u")
        meeting.schedule(other, 40, (7, 8, 9))
        request = meeting.arrive()
        meeting.schedule(request)
        meeting.finish(other, "FINISHED_ABORTED", (7, 8, 9))
        meeting.p.message()
        params = meeting.finish(request)
        assert params is not None
        # Under the number that the workers know.
        assert read_ticket(params).production == 2

    @pytest.mark.parametrize("is_dropped", [False, True])
    def test_windowed_prompt_without_a_lease_is_given_up_at_once(
        self, clock: FakeClock, is_dropped: bool
    ) -> None:
        """vLLM uses again what the window leaves while P goes on generating: a D that reserved then
        was sent other requests' blocks."""
        window = Group(0, "SlidingWindowSpec", 16, ("layer0",), window=16)
        meeting = Meeting(
            clock, groups=(window,), max_leased_fraction=0.02, unreserved_fraction=1.0
        )
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        meeting.announce(takes_push=False)
        request = meeting.arrive()
        meeting.schedule(request, 20)
        if is_dropped:
            meeting.drop()
        step = meeting.go_on(request, 20, 40)
        assert (step.voids, step.chunks) == ([2], [])
        assert meeting.kinds() == [Queued, Gone][: 1 if is_dropped else 2]
        assert meeting.p.counts().get("leases_over_cap", 0) == (0 if is_dropped else 1)
        assert meeting.finish(request) is None
        assert meeting.num_handovers == 1


class TestGate:
    def test_prompt_waits_while_others_without_a_d_have_their_share(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, unreserved_fraction=0.05)
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        request = meeting.arrive()
        assert meeting.p.producer.must_wait(request)
        meeting.announce(has_blocks=True)
        assert not meeting.p.producer.must_wait(request)

    def test_prompt_that_no_d_asks_for_becomes_a_plain_prefill(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, unreserved_fraction=0.05, first_contact_timeout_s=5.0)
        meeting.schedule(meeting.arrive("q", "u"), 40, (7, 8, 9))
        request = meeting.arrive()
        assert meeting.p.producer.must_wait(request)
        clock.advance(5.0)
        assert meeting.schedule(request).chunks == []
        assert meeting.num_handovers == 1
        assert meeting.p.counts()["not_handed_over"] == 1
        assert meeting.finish(request) is None
        assert meeting.p.producer.num_leases == 1  # the other prompt's
        assert not meeting.p.producer._plain

    def test_request_of_the_sequential_flow_never_waits(self, meeting: Meeting) -> None:
        assert not meeting.p.producer.must_wait(meeting.arrive(transfer_id=None))


class TestGrant:
    def test_d_that_takes_no_push_is_granted_when_the_request_ends(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, can_push=False)
        meeting.announce()
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.kinds() == [Queued]
        meeting.finish(request)
        grant = Grant(claim_id=1, production=1, secret="t", block_ids=(BLOCKS,))
        assert meeting.answers[1][-1] == grant
        meeting.announce(2)
        assert meeting.answers[2] == [
            Grant(claim_id=2, production=1, secret="t", block_ids=(BLOCKS,))
        ]
        assert meeting.release(1)
        assert meeting.release(2)
        assert meeting.p.message().voids == [1]

    def test_pushed_d_is_not_granted(self, meeting: Meeting) -> None:
        meeting.announce()
        request = meeting.arrive()
        meeting.schedule(request)
        meeting.finish(request)
        meeting.announce(2)
        assert (meeting.kinds(1), meeting.kinds(2)) == ([Queued, Admitted], [Admitted])


class TestDigest:
    def test_pushed_prompt_is_digested_under_its_transfer_id_once(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, kv_digest="/somewhere")
        request = meeting.arrive()
        meeting.schedule(request)
        meeting.finish(request)
        assert meeting.p.message().sent_prompts == [SentPrompt("p", "t", (BLOCKS,))]
        assert meeting.p.message().is_empty
