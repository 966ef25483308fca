"""``Producer`` with ``integrity``: the workers know which leases live and what is final."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.clock import FakeClock
from fakes.meeting import BLOCKS, Meeting
from fakes.prefiller import LEASE_S, Prefiller

from vllm_llmdd_connector.metadata import LeasedPrompt
from vllm_llmdd_connector.params import read_ticket


@pytest.fixture
def prefiller(clock: FakeClock) -> Prefiller:
    return Prefiller(clock, integrity="sample")


@pytest.fixture
def meeting(clock: FakeClock) -> Meeting:
    return Meeting(clock, integrity="full")


def leased(secret: str, num_final: int, production: int = 1) -> list[LeasedPrompt]:
    return [LeasedPrompt(production, secret, (BLOCKS,), (num_final,))]


class TestPull:
    @pytest.mark.parametrize(
        ("changes", "num_final"),
        [({}, 3), ({"max_tokens": 2}, 2), ({"max_tokens": 1}, 3)],
        ids=str,
    )
    def test_next_step_tells_the_workers_of_a_lease(
        self, prefiller: Prefiller, changes: dict[str, Any], num_final: int
    ) -> None:
        params = prefiller.finish(**changes)
        assert params is not None
        secret = read_ticket(params).secret
        assert prefiller.message().leased == leased(secret, num_final)
        assert prefiller.message().leased == []

    def test_blocks_are_back_no_earlier_than_the_workers_know(self, prefiller: Prefiller) -> None:
        ticket = prefiller.ticket()
        prefiller.message()
        prefiller.claim(ticket)
        prefiller.release(ticket)
        assert prefiller.step() == [6, 5, 4]
        assert prefiller.message().unleased == [1]
        assert prefiller.message().unleased == []

    def test_expired_lease_is_named_too(self, prefiller: Prefiller, clock: FakeClock) -> None:
        prefiller.finish()
        prefiller.message()
        clock.advance(LEASE_S)
        assert prefiller.message().unleased == [1]

    def test_lease_that_began_and_ended_between_two_steps_never_lives(
        self, prefiller: Prefiller, clock: FakeClock
    ) -> None:
        prefiller.finish()
        clock.advance(LEASE_S)
        step = prefiller.message()
        assert (step.leased, step.unleased) == ([], [1])

    def test_off_tells_nothing(self, clock: FakeClock) -> None:
        prefiller = Prefiller(clock)
        prefiller.finish()
        step = prefiller.message()
        clock.advance(LEASE_S)
        later = prefiller.message()
        assert (step.leased, step.unleased, later.leased, later.unleased) == ([], [], [], [])


class TestPush:
    @pytest.mark.parametrize(("max_tokens", "num_final"), [(1, 3), (16, 2)])
    def test_chunks_and_lease_name_the_final_blocks(
        self, meeting: Meeting, max_tokens: int, num_final: int
    ) -> None:
        request = meeting.arrive(max_tokens=max_tokens)
        step = meeting.schedule(request)
        assert [chunk.num_final for chunk in step.chunks] == [(num_final,)]
        assert step.leased == leased("t", num_final)

    def test_preempted_prompt_is_no_lease_any_more(self, meeting: Meeting) -> None:
        request = meeting.arrive()
        meeting.schedule(request)
        step = meeting.preempt(request)
        assert step.unleased == step.voids[:1] == [1]

    def test_speculative_decoding_writes_behind_any_prompt(self, clock: FakeClock) -> None:
        meeting = Meeting(clock, integrity="full", has_drafts=True)
        step = meeting.schedule(meeting.arrive())
        assert [chunk.num_final for chunk in step.chunks] == [(2,)]

    def test_off_names_none(self, clock: FakeClock) -> None:
        meeting = Meeting(clock)
        step = meeting.schedule(meeting.arrive())
        assert [chunk.num_final for chunk in step.chunks] == [()]
        assert step.leased == []
