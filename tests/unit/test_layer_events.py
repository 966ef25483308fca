"""``LayerEvents``: a region is marked when all layers that write it have been computed."""

from __future__ import annotations

import pytest
from fakes.fake_push import FakeSynchronizer

from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.layer_events import LayerEvents


def region(name: str, *layers: str) -> Region:
    return Region(name, 0, 64, layers or (name,))


def plan(model_id: int, *regions: Region) -> CachePlan:
    return CachePlan(model_id, 0, 8, 64, regions)


class Events:
    """``LayerEvents`` with looks at what a transfer of the running step would see."""

    def __init__(self, *plans: CachePlan) -> None:
        self.created: list[FakeSynchronizer] = []
        self.events = LayerEvents(plans, self.create)

    def create(self, num_layers: int) -> FakeSynchronizer:
        self.created.append(FakeSynchronizer(num_layers))
        return self.created[-1]

    def seen(self, model_id: int, generation: int) -> FakeSynchronizer:
        found = self.events.synchronizer(model_id, generation)
        assert isinstance(found, FakeSynchronizer)
        return found

    def marked(self, model_id: int = 0) -> list[bool]:
        """Of the running step."""
        return self.seen(model_id, self.events.generation).marked


@pytest.fixture
def two() -> Events:
    """Layers a and b, one region each, of one cache."""
    return Events(plan(0, region("a"), region("b")))


class TestSteps:
    def test_hook_marks_its_layer_of_the_running_step(self, two: Events) -> None:
        two.events.begin()
        assert two.marked() == [False, False]
        two.events.computed("b")
        assert two.marked() == [False, True]

    def test_end_marks_what_no_hook_reported_for_transfers_that_wait(self, two: Events) -> None:
        two.events.begin()
        waiting = two.seen(0, 1).step
        two.events.computed("a")
        two.events.end()
        assert waiting.marks == [True, True]
        assert two.marked() == [True, True]

    def test_transfer_keeps_to_the_step_it_was_started_in(self, two: Events) -> None:
        two.events.begin()
        first = two.seen(0, 1).step
        two.events.computed("a")
        two.events.begin()
        two.events.computed("b")
        assert first.marks == [True, False]
        assert first.is_over
        assert not first.wait(1)
        assert two.marked() == [False, True]

    def test_blocks_of_earlier_steps_do_not_wait_for_the_running_one(self, two: Events) -> None:
        two.events.begin()
        two.events.end()
        two.events.begin()
        assert two.marked() == [False, False]
        for settled in (0, 1):
            assert two.seen(0, settled).marked == [True, True]

    def test_generations_count_steps(self, two: Events) -> None:
        assert (two.events.generation, two.events.is_running) == (0, False)
        two.events.begin()
        assert (two.events.generation, two.events.is_running) == (1, True)
        two.events.end()
        assert (two.events.generation, two.events.is_running) == (1, False)
        two.events.begin()
        assert two.events.generation == 2

    def test_end_of_no_step_marks_nothing(self, two: Events) -> None:
        two.events.end()
        live = two.created[0]
        assert live.marked == [False, False]

    @pytest.mark.parametrize("name", ["", "unknown", "a.b"])
    def test_layer_that_is_not_transferred_marks_nothing(self, two: Events, name: str) -> None:
        two.events.begin()
        two.events.computed(name)
        assert two.marked() == [False, False]


class TestNoWork:
    def test_hook_outside_a_step_with_prompts_finds_an_empty_table(self, two: Events) -> None:
        """The path of every layer of every other forward: one look-up and no lock."""
        for _ in range(2):
            assert two.events._active == {}
            two.events.computed("a")
            assert two.created[0].marked == [False, False]
            two.events.begin()
            assert two.events._active.keys() == {"a", "b"}
            two.events.end()
            two.created[0].reset()

    def test_region_of_its_own_layer_is_marked_without_a_frame_between(self, two: Events) -> None:
        two.events.begin()
        marks = two.events._active["a"]
        assert getattr(marks, "func", None) == two.created[0].mark


class TestRegions:
    def test_layer_with_several_parts_marks_them_all(self) -> None:
        """K and V of one length are one cache's regions; of two lengths, two caches'."""
        events = Events(
            plan(0, region("a#0", "a"), region("b#0", "b"), region("a#1", "a")),
            plan(1, region("a#2", "a")),
        )
        events.events.begin()
        events.events.computed("a")
        assert events.marked(0) == [True, False, True]
        assert events.marked(1) == [True]

    def test_joined_region_is_marked_by_the_last_of_its_layers(self) -> None:
        events = Events(plan(0, region("a+b", "a", "b"), region("c")))
        events.events.begin()
        events.events.computed("b")
        assert events.marked() == [False, False]
        events.events.computed("b")
        assert events.marked() == [False, False]
        events.events.computed("a")
        assert events.marked() == [True, False]

    def test_joined_region_starts_over_in_each_step(self) -> None:
        events = Events(plan(0, region("a+b", "a", "b")))
        events.events.begin()
        events.events.computed("a")
        events.events.end()
        events.events.begin()
        events.events.computed("b")
        assert events.marked() == [False]

    def test_layer_that_fills_several_places_of_a_row_counts_once_for_each_row(self) -> None:
        """Its K and V side by side with another layer's, and a row of its own."""
        events = Events(plan(0, region("row", "a", "a", "b"), region("own", "a")))
        events.events.begin()
        events.events.computed("a")
        assert events.marked() == [False, True]
        events.events.computed("b")
        assert events.marked() == [True, True]

    def test_layer_that_shares_another_one_s_cache_marks_nothing(self) -> None:
        """It comes later and reads what the first one wrote; only that one names the region."""
        events = Events(plan(0, region("writer"), region("c")))
        events.events.begin()
        events.events.computed("reader")
        assert events.marked() == [False, False]
        events.events.computed("writer")
        assert events.marked() == [True, False]

    def test_groups_that_overlay_each_other_are_marked_each_by_its_layer(self) -> None:
        events = Events(plan(0, region("a")), plan(1, region("b")))
        events.events.begin()
        events.events.computed("b")
        assert (events.marked(0), events.marked(1)) == ([False], [True])
