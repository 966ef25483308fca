"""``PrefillSteps``: vLLM's step outputs as chunks of the prompts that are followed."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.prefiller import make_output
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.scheduler.prefill_steps import PrefillSteps, StepPrefills


class Follower:
    """``PrefillSteps`` of groups with these block sizes; productions count from 7."""

    def __init__(
        self, block_sizes: tuple[int, ...] = (16,), groups: tuple[int, ...] = (0,)
    ) -> None:
        self.steps = PrefillSteps(block_sizes, lambda ids: [ids[group] for group in groups])
        self.last_production = 6

    def observe(self, **output: Any) -> StepPrefills | None:
        return self.steps.observe(make_output(**output), self.new_production)

    def seen(self, **output: Any) -> StepPrefills:
        step = self.observe(**output)
        assert step is not None
        return step

    def new_production(self) -> int:
        self.last_production += 1
        return self.last_production

    def new(self, ids: list[int], scheduled: int, computed: int = 0) -> StepPrefills:
        """The step that first schedules request ``r``."""
        return self.seen(new={"r": ([ids], computed)}, num_scheduled={"r": scheduled})

    def go_on(self, ids: list[int] | None, scheduled: int, computed: int) -> StepPrefills:
        block_ids = None if ids is None else [ids]
        return self.seen(cached={"r": (block_ids, computed)}, num_scheduled={"r": scheduled})


@pytest.fixture
def follower() -> Follower:
    """Follows request ``r`` of 40 tokens."""
    follower = Follower()
    follower.steps.follow("r", "t", 40)
    return follower


def chunk(ids: tuple[int, ...], end: int, production: int = 7) -> PrefillChunk:
    return PrefillChunk("t", production, 40, (ids,), end)


class TestChunks:
    def test_whole_prompt_in_one_step_is_computed_by_it(self, follower: Follower) -> None:
        step = follower.new([4, 5, 6], 40)
        assert step.chunks == [chunk((4, 5, 6), 40)]
        assert [(p.request_id, p.production) for p in step.completed] == [("r", 7)]

    def test_each_chunk_names_the_new_blocks_only(self, follower: Follower) -> None:
        assert follower.new([4], 16).chunks == [chunk((4,), 16)]
        middle = follower.go_on([5], 10, 16)
        assert (middle.chunks, middle.completed) == ([chunk((5,), 26)], [])
        last = follower.go_on([6], 14, 26)
        assert last.chunks == [chunk((6,), 40)]
        assert len(last.completed) == 1

    def test_chunk_within_known_blocks_names_none(self, follower: Follower) -> None:
        follower.new([4, 5, 6], 20)
        assert follower.go_on(None, 5, 20).chunks == [chunk((), 25)]

    def test_blocks_found_in_p_s_prefix_cache_come_with_the_first_chunk(
        self, follower: Follower
    ) -> None:
        assert follower.new([1, 2, 6], 8, computed=32).chunks == [chunk((1, 2, 6), 40)]

    def test_s28_wrong_output_none_of_lookahead_blocks(self, follower: Follower) -> None:
        assert follower.new([4, 5, 6, 7, 8], 45).chunks == [chunk((4, 5, 6), 40)]
        after = follower.go_on([9], 1, 40)
        assert (after.chunks, after.completed) == ([], [])

    def test_followed_request_that_is_not_scheduled_has_no_chunk(self, follower: Follower) -> None:
        assert follower.seen(num_scheduled={}) == StepPrefills()

    def test_other_requests_are_no_chunk(self, follower: Follower) -> None:
        step = follower.seen(
            new={"other": ([[1]], 0)},
            cached={"another": ([[2]], 0)},
            num_scheduled={"other": 16, "another": 16},
            preempted={"third"},
        )
        assert step == StepPrefills()

    def test_requests_have_a_production_each(self, follower: Follower) -> None:
        follower.steps.follow("s", "u", 16)
        step = follower.seen(
            new={"r": ([[4, 5, 6]], 0), "s": ([[7]], 0)}, num_scheduled={"r": 40, "s": 16}
        )
        assert [(c.transfer_id, c.production) for c in step.chunks] == [("t", 7), ("u", 8)]

    @given(data=st.data(), num_tokens=st.integers(1, 200), size=st.integers(1, 20))
    def test_chunks_together_are_the_prompt(
        self, data: st.DataObject, num_tokens: int, size: int
    ) -> None:
        """However vLLM cuts it, and whether it allocates early or late."""
        follower = Follower((size,))
        follower.steps.follow("r", "t", num_tokens)
        told: list[int] = []
        allocated = computed = data.draw(st.integers(0, num_tokens - 1))
        allocated = -(-computed // size)
        ids = list(range(1, allocated + 1))
        is_first = True
        while computed < num_tokens:
            end = data.draw(st.integers(computed + 1, num_tokens))
            needed = -(-end // size) + data.draw(st.integers(0, 2))
            new = list(range(allocated + 1, needed + 1))
            allocated = max(allocated, needed)
            scheduled = end - computed
            step = (
                follower.new(ids + new, scheduled, computed)
                if is_first
                else follower.go_on(new or None, scheduled, computed)
            )
            is_first = False
            (part,) = step.chunks
            told.extend(part.block_ids[0])
            computed = end
            assert part.end_token == end
            assert len(told) >= end // size
            assert bool(step.completed) is (end == num_tokens)
        assert told == list(range(1, -(-num_tokens // size) + 1))


class TestPreemption:
    def test_preempted_production_is_lost_and_the_resumed_one_is_another(
        self, follower: Follower
    ) -> None:
        follower.new([4, 5], 20)
        lost = follower.seen(preempted={"r"})
        assert [(p.request_id, production) for p, production in lost.voided] == [("r", 7)]
        resumed = follower.go_on([8, 9, 10], 40, 0)
        assert resumed.chunks == [chunk((8, 9, 10), 40, production=8)]
        assert [p.production for p in resumed.completed] == [8]

    def test_preemption_that_vllm_does_not_name_is_seen_by_its_count(self) -> None:
        """A reset of the prefix cache gave the blocks to others, and a D was sent their bytes."""
        follower, counts = Follower(), [0]
        follower.steps.follow("r", "t", 40, lambda: counts[0])
        follower.new([4, 5], 20)
        assert follower.go_on([6], 10, 20).voided == []
        counts[0] += 1
        lost = follower.seen(num_scheduled={})
        assert [(p.request_id, production) for p, production in lost.voided] == [("r", 7)]
        assert follower.seen(num_scheduled={}).voided == []
        assert follower.go_on([8, 9, 10], 40, 0).chunks == [chunk((8, 9, 10), 40, production=8)]

    def test_preempted_and_resumed_in_one_step(self) -> None:
        follower, counts = Follower(), [0]
        follower.steps.follow("r", "t", 40, lambda: counts[0])
        follower.new([4, 5, 6], 40)
        counts[0] += 1
        step = follower.go_on([8, 9, 10], 40, 0)
        assert [production for _, production in step.voided] == [7]
        assert step.chunks == [chunk((8, 9, 10), 40, production=8)]

    def test_prompt_that_was_computed_is_computed_anew(self, follower: Follower) -> None:
        follower.new([4, 5, 6], 40)
        follower.go_on([7], 1, 40)
        assert len(follower.seen(preempted={"r"}).voided) == 1
        resumed = follower.go_on([1, 2, 3], 30, 0)
        assert (resumed.chunks, resumed.completed) == ([chunk((1, 2, 3), 30, production=8)], [])

    def test_resumed_as_a_new_request_is_the_same(self, follower: Follower) -> None:
        """vLLM's second model runner is told so."""
        follower.new([4, 5, 6], 40)
        follower.seen(preempted={"r"})
        assert follower.new([1, 2, 3], 40).chunks == [chunk((1, 2, 3), 40, production=8)]

    def test_request_preempted_before_its_first_chunk_has_nothing_to_lose(
        self, follower: Follower
    ) -> None:
        assert follower.seen(preempted={"r"}).voided == []

    def test_second_preemption_without_a_resume_loses_nothing_more(
        self, follower: Follower
    ) -> None:
        follower.new([4], 16)
        follower.seen(preempted={"r"})
        assert follower.seen(preempted={"r"}).voided == []


class TestGroups:
    def test_groups_are_told_apart_each_by_its_block_size(self) -> None:
        follower = Follower((16, 8), (0, 1))
        follower.steps.follow("r", "t", 40)
        step = follower.seen(new={"r": ([[1, 2], [11, 12, 13]], 0)}, num_scheduled={"r": 20})
        assert step.chunks[0].block_ids == ((1, 2), (11, 12, 13))
        more = follower.seen(cached={"r": ([[3], [14, 15, 16]], 20)}, num_scheduled={"r": 20})
        assert more.chunks[0].block_ids == ((3,), (14, 15))

    def test_groups_that_are_not_transferred_are_left_out(self) -> None:
        follower = Follower((16,), (1,))
        follower.steps.follow("r", "t", 16)
        step = follower.seen(new={"r": ([[9], [4]], 0)}, num_scheduled={"r": 16})
        assert step.chunks[0].block_ids == ((4,),)

    def test_blocks_that_have_left_a_window_keep_their_place(self, follower: Follower) -> None:
        """vLLM puts its null block there when it finds a prefix beyond the window."""
        step = follower.new([0, 0, 6], 8, computed=32)
        assert step.chunks == [chunk((0, 0, 6), 40)]
        (prefill,) = step.completed
        assert prefill.prompt_block_ids([16]) == ((0, 0, 6),)


class TestFollowing:
    def test_nothing_followed_costs_a_look(self) -> None:
        """Not even the output is looked at."""
        nothing: Any = object()
        assert Follower().steps.observe(nothing, lambda: 1) is None

    def test_forgotten_request_is_returned_once_and_followed_no_more(
        self, follower: Follower
    ) -> None:
        follower.new([4], 16)
        forgotten = follower.steps.forget("r")
        assert forgotten is not None
        assert (forgotten.transfer_id, forgotten.production) == ("t", 7)
        assert follower.steps.forget("r") is None
        assert follower.observe(num_scheduled={"r": 1}) is None
