"""``Producer`` of announced prompts whose computation or D ends early: nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fakes.clock import FakeClock
from fakes.meeting import BLOCKS, Meeting
from fakes.prefiller import LEASE_S

from vllm_llmdd_connector.control.messages import Gone
from vllm_llmdd_connector.metadata import PrefillChunk


@pytest.fixture
def meeting(clock: FakeClock) -> Iterator[Meeting]:
    """At the end nothing may be left but what a lease or a D of the test's own holds."""
    meeting = Meeting(clock)
    yield meeting
    clock.advance(10 * LEASE_S)
    meeting.p.message()
    assert meeting.p.producer.num_leases == 0
    assert sorted(meeting.pool.touched) == sorted(meeting.pool.freed)


class TestAbort:
    @pytest.mark.parametrize("end", [0, 20, 40])
    def test_abort_voids_the_production_and_tells_d(self, meeting: Meeting, end: int) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        if end:
            meeting.schedule(request, end)
        meeting.finish(request, "FINISHED_ABORTED", BLOCKS if end else ())
        assert meeting.kinds()[-1] is Gone
        assert set(meeting.p.message().voids) == ({1} if end else set())
        assert (meeting.num_handovers, meeting.pool.in_use) == (0, [])


class TestPreemption:
    def test_preemption_voids_the_production_and_its_lease(self, meeting: Meeting) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        step = meeting.preempt(request)
        assert step.voids == [1]
        assert meeting.pool.in_use == []
        assert meeting.p.counts()["leases_voided"] == 1
        again = meeting.schedule(request, 40, (7, 8, 9))
        assert again.chunks == [PrefillChunk("t", 2, 40, ((7, 8, 9),), 40)]
        assert meeting.p.renew(1) == []
        assert meeting.release(production=2)
        assert meeting.p.message().voids == [2]

    def test_release_of_a_production_that_was_lost_meanwhile_lets_d_go(
        self, meeting: Meeting
    ) -> None:
        """It was done before the void: D has everything. The production is not held any more."""
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        meeting.preempt(request)
        assert not meeting.release(production=1)
        meeting.schedule(request, 40, (7, 8, 9))
        assert meeting.finish(request, blocks=(7, 8, 9)) is None
        assert meeting.num_handovers == 0

    def test_d_that_has_everything_does_not_hold_the_next_production(
        self, meeting: Meeting
    ) -> None:
        """It was attached again to the lease of a resumed prompt, which then had to expire."""
        meeting.announce(1, has_blocks=True)
        meeting.announce(2, has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.release(1)
        meeting.preempt(request)
        meeting.schedule(request, 40, (7, 8, 9))
        assert meeting.release(2, production=2)
        assert meeting.p.message().voids == [2]

    def test_preemption_right_after_the_last_release_needs_no_further_lease(
        self, meeting: Meeting
    ) -> None:
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request)
        assert meeting.release()
        meeting.preempt(request)
        meeting.schedule(request, 40, (7, 8, 9))
        assert meeting.p.producer.num_leases == 0
        assert meeting.finish(request, blocks=(7, 8, 9)) is None
        assert meeting.num_handovers == 0


class TestDrop:
    def test_drop_ends_the_lease_of_a_running_request(self, meeting: Meeting) -> None:
        meeting.announce()
        meeting.schedule(meeting.arrive())
        meeting.drop()
        assert meeting.p.message().voids == [1]
        assert meeting.num_handovers == 0

    def test_prompt_that_its_d_dropped_is_not_held(self, meeting: Meeting) -> None:
        meeting.announce()
        request = meeting.arrive()
        meeting.drop()
        meeting.schedule(request)
        assert meeting.finish(request) is None
        assert meeting.pool.touched == []
        assert meeting.p.message().voids == [1]

    def test_drop_of_one_d_leaves_the_other_s(self, meeting: Meeting) -> None:
        meeting.announce(1)
        meeting.announce(2)
        meeting.schedule(meeting.arrive())
        meeting.drop(1)
        assert meeting.p.message().voids == []
        meeting.drop(2)
        assert meeting.p.message().voids == [1]

    def test_production_that_ends_with_its_last_step_is_not_begun_again(
        self, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """D's release came between the lease's start and the step's end: the workers forgot the
        production, and began it anew with the last chunk, for ever and with the wrong blocks."""
        meeting.announce(has_blocks=True)
        request = meeting.arrive()
        meeting.schedule(request, 20)
        free_ended = meeting.p.producer.free_ended

        def release_then_free() -> None:
            assert meeting.release()
            free_ended()

        monkeypatch.setattr(meeting.p.producer, "free_ended", release_then_free)
        step = meeting.go_on(request, 20, 40)
        monkeypatch.undo()
        assert (step.voids, step.chunks) == ([1], [])
