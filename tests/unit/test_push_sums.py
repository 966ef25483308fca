"""P's worker with ``integrity``: ``Done`` comes with the sums of what was sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
from fakes.clock import PATIENCE_S, FakeClock, wait_for
from fakes.push_side import PushSide
from fakes.summed_memory import SummedMemory

from vllm_llmdd_connector.control.messages import BlockSpan, Done, Failed, GroupSums, Message, Void
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.worker.checksum import BlockReader, chosen, pack
from vllm_llmdd_connector.worker.push_sums import PushSums
from vllm_llmdd_connector.worker.sum_thread import SumJob, SumThread

BLOCKS = (4, 5, 3)
FINAL, OPEN = (3,), (2,)
"""Of 40 tokens in blocks of 16, P having ended and going on."""


class Sums:
    """A rank that pushes prompts of three blocks out of ``memory``."""

    def __init__(self, clock: FakeClock, policy: Literal["sample", "full"]) -> None:
        self.memory = SummedMemory()
        self.memory.plans = [_with_layers(plan) for plan in self.memory.plans]
        self.summed: list[tuple[int, int, list[int]]] = []
        """Cache, region and blocks, in the order in which they were read."""
        self.thread = SumThread(BlockReader(self.memory.plans))
        sum_region = self.thread._sum_region

        def noted(job: SumJob) -> None:
            sum_region(job)
            self.summed.append((job.plan.model_id, job.next_region - 1, [*job.blocks.values()]))

        self.thread._sum_region = noted  # type: ignore[method-assign]
        sums = PushSums(self.memory.plans, policy, self.thread)
        self.p = PushSide(clock, self.memory.plans, sums)

    def end_tasks(self) -> None:
        """The engine has sent everything."""
        for task in self.p.tasks:
            task.end()

    def wait_summed(self, count: int) -> None:
        wait_for(lambda: len(self.summed) >= count, f"{count} regions summed")

    def done(self, blocks: tuple[int, ...], count: int, production: int = 7) -> Message:
        sums = pack(self.memory.sums(*blocks))
        groups = (GroupSums(count=count, sums=sums),)
        return Done(transfer_id="t", reservation=1, production=production, sums=groups)

    def close(self) -> None:
        self.p.close()
        self.thread.close()


def _with_layers(plan: CachePlan) -> CachePlan:
    return plan._replace(
        regions=tuple(region._replace(layers=(region.name,)) for region in plan.regions)
    )


@pytest.fixture
def make(clock: FakeClock) -> Iterator[Callable[..., Sums]]:
    made: list[Sums] = []

    def make(policy: Literal["sample", "full"] = "full") -> Sums:
        made.append(Sums(clock, policy))
        return made[-1]

    yield make
    for sums in made:
        sums.close()


@pytest.fixture
def full(make: Callable[..., Sums]) -> Sums:
    return make()


class TestDone:
    @pytest.mark.parametrize("d_is_first", [True, False])
    def test_it_has_the_sums_of_all_layers(self, full: Sums, d_is_first: bool) -> None:
        if d_is_first:
            full.p.reserve()
        full.p.step(40, *BLOCKS, num_final=FINAL)
        if not d_is_first:
            full.p.reserve()
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS, 3)]

    def test_it_waits_for_the_sums(self, full: Sums) -> None:
        full.p.reserve()
        full.p.begin(40, *BLOCKS, num_final=FINAL)
        full.end_tasks()
        full.p.pusher.layer_computed("r0")
        full.wait_summed(1)
        assert full.p.answers == []
        full.p.pusher.end_step()
        assert full.p.wait_answers() == [full.done(BLOCKS, 3)]

    def test_it_waits_for_the_transfers(self, full: Sums) -> None:
        full.p.reserve()
        full.p.step(40, *BLOCKS, num_final=FINAL)
        full.wait_summed(3)
        assert full.p.answers == []
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS, 3)]

    def test_a_last_block_to_which_p_writes_has_none(self, full: Sums) -> None:
        full.p.reserve()
        full.p.step(40, *BLOCKS, num_final=OPEN)
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS[:2], 2)]

    def test_blocks_that_d_has_are_not_summed(self, full: Sums) -> None:
        full.p.reserve(spans=(BlockSpan(first=1, count=2),))
        full.p.step(40, *BLOCKS, num_final=FINAL)
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS[1:], 2)]

    def test_a_sample_is_what_its_reservation_chooses(self, make: Callable[..., Sums]) -> None:
        p = make("sample")
        p.p.reserve()
        p.p.step(40, *BLOCKS, num_final=FINAL)
        p.end_tasks()
        positions = chosen("sample", 1, 0, 3)
        assert positions == [0, 2]
        assert p.p.wait_answers() == [p.done(tuple(BLOCKS[i] for i in positions), 3)]


class TestOrder:
    def test_a_layer_is_summed_once_it_is_computed(self, full: Sums) -> None:
        full.p.reserve()
        full.p.begin(40, *BLOCKS, num_final=FINAL)
        assert full.summed == []
        full.memory.flip(2, 4, 0)
        full.p.pusher.layer_computed("r2")
        full.wait_summed(1)
        assert full.summed == [(1, 0, list(BLOCKS))]
        full.memory.flip(0, 5, 0)
        full.p.pusher.end_step()
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS, 3)]

    def test_each_block_of_a_chunked_prompt_is_summed_once(self, full: Sums) -> None:
        full.p.reserve()
        full.p.step(20, *BLOCKS, num_final=FINAL)
        full.wait_summed(3)
        full.p.step(40, block_ids=((),), num_final=FINAL)
        full.wait_summed(6)
        full.end_tasks()
        assert full.p.wait_answers() == [full.done(BLOCKS, 3)]
        regions = ((0, 0), (0, 1), (1, 0))
        parts = [(*region, blocks) for blocks in ([4], [5, 3]) for region in regions]
        assert sorted(full.summed) == sorted(parts)


class TestGivenUp:
    def test_sums_of_a_void_production_are_dropped(self, full: Sums) -> None:
        """What the void allows vLLM to write is not read for the next production either."""
        full.p.reserve()
        full.p.begin(40, *BLOCKS, num_final=FINAL)
        full.p.pusher.layer_computed("r0")
        full.wait_summed(1)
        full.p.pusher.void([7])
        assert full.p.wait_answers() == [Void(transfer_id="t", reservation=1)]
        full.p.pusher.end_step()
        full.p.reserve(reservation=3)
        full.p.step(40, *BLOCKS, num_final=FINAL, production=8)
        full.end_tasks()
        done = full.p.wait_answers(2)[1]
        assert isinstance(done, Done)
        assert done.production == 8
        assert done.sums[0].sums == pack(full.memory.sums(*BLOCKS))
        assert len(full.summed) == 4, "one region before the void, three after it"

    def test_a_void_does_not_wait_for_the_reading(self, full: Sums) -> None:
        reading, gate = threading.Event(), threading.Event()
        sum_region = full.thread._sum_region

        def held(job: SumJob) -> None:
            reading.set()
            assert gate.wait(PATIENCE_S)
            sum_region(job)

        full.thread._sum_region = held  # type: ignore[method-assign]
        full.p.reserve()
        full.p.step(40, *BLOCKS, num_final=FINAL)
        assert reading.wait(PATIENCE_S)
        full.p.pusher.void([7])
        assert full.p.answers == [Void(transfer_id="t", reservation=1)]
        gate.set()

    def test_a_step_that_never_ends_fails_its_prompt(self, full: Sums) -> None:
        full.p.reserve()
        full.p.begin(40, *BLOCKS, num_final=FINAL)
        full.p.begin(40, 1, 2, transfer_id="u", production=8, num_final=FINAL)
        (answer,) = full.p.wait_answers()
        assert isinstance(answer, Failed)
        full.p.pusher.end_step()
        full.p.reserve(reservation=3, transfer_id="v")
        full.p.step(40, *BLOCKS, num_final=FINAL, transfer_id="v", production=9)
        full.end_tasks()
        assert isinstance(full.p.wait_answers(2)[1], Done)
        assert full.summed[0] == (0, 0, list(BLOCKS))
        assert len(full.summed) == 3


def test_off_sends_no_sums(clock: FakeClock) -> None:
    p = PushSide(clock)
    p.reserve()
    p.step()
    p.tasks[0].end()
    assert p.wait_answers() == [Done(transfer_id="t", reservation=1, production=7)]
    p.close()
