"""``PushPlan``: each wanted block is ordered once, whatever comes first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_llmdd_connector.control.messages import BlockSpan, Message, Reserve
from vllm_llmdd_connector.metadata import PrefillChunk
from vllm_llmdd_connector.worker import push_plan as plan_module
from vllm_llmdd_connector.worker.push_plan import (
    MAX_PER_TRANSFER,
    SETTLED,
    Order,
    PushPlan,
    Reservation,
)

SIZE = 16
Sent = tuple[list[int], list[int], int]
"""Source blocks, destination positions, generation."""


def ignore(message: Message) -> None:
    """The plan itself answers nobody."""


def make_reserve(reservation: int = 1, *spans: tuple[int, int], transfer_id: str = "t") -> Reserve:
    """By default for the first three blocks of the one group."""
    return Reserve(
        to_cluster=0xA,
        cluster_id=0xD,
        transfer_id=transfer_id,
        reservation=reservation,
        spans=tuple(BlockSpan(first=first, count=count) for first, count in spans or ((0, 3),)),
        tokens=(),
        link_number=1,
    )


def chunk(
    end: int, *block_ids: tuple[int, ...], production: int = 7, transfer_id: str = "t"
) -> PrefillChunk:
    """Of a prompt of 40 tokens."""
    return PrefillChunk(transfer_id, production, 40, block_ids, end)


def sent(orders: list[Order]) -> list[Sent]:
    return [(order.src_blocks, order.dst_positions, order.generation) for order in orders]


class Planner:
    """A plan and the reservations it has made, by the orders that name them."""

    def __init__(self, block_sizes: tuple[int, ...] = (SIZE,)) -> None:
        self.plan = PushPlan(block_sizes)

    def reserve(self, reservation: int = 1, *spans: tuple[int, int], **changes: Any) -> list[Order]:
        return self.plan.reserve(make_reserve(reservation, *spans, **changes), ignore, 0.0)


@pytest.fixture
def planner() -> Planner:
    return Planner()


class TestOrders:
    def test_each_chunk_orders_the_blocks_that_it_fills(self, planner: Planner) -> None:
        assert planner.reserve() == []
        assert sent(planner.plan.advance(chunk(20, (4, 5)), 1)) == [([4], [0], 1)]
        assert sent(planner.plan.advance(chunk(32, ()), 2)) == [([5], [1], 2)]
        assert sent(planner.plan.advance(chunk(40, (6,)), 3)) == [([6], [2], 3)]

    def test_chunk_that_fills_no_block_orders_nothing(self, planner: Planner) -> None:
        planner.reserve()
        assert planner.plan.advance(chunk(15, (4,)), 1) == []

    def test_last_block_is_ordered_though_the_prompt_does_not_fill_it(
        self, planner: Planner
    ) -> None:
        planner.reserve()
        assert sent(planner.plan.advance(chunk(40, (4, 5, 6)), 1)) == [([4, 5, 6], [0, 1, 2], 1)]

    def test_late_reservation_takes_settled_blocks_apart_from_those_of_the_last_step(
        self, planner: Planner
    ) -> None:
        """The step may still run: only its own blocks wait for its layers."""
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.advance(chunk(40, (6,)), 2)
        assert sent(planner.reserve()) == [([4], [0], SETTLED), ([5, 6], [1, 2], 2)]

    def test_positions_count_from_d_s_first_wanted_block(self, planner: Planner) -> None:
        planner.reserve(1, (1, 2))
        assert planner.plan.advance(chunk(20, (4, 5)), 1) == []
        assert sent(planner.plan.advance(chunk(40, (6,)), 2)) == [([5, 6], [0, 1], 2)]

    def test_blocks_behind_the_wanted_ones_are_not_ordered(self, planner: Planner) -> None:
        planner.reserve(1, (0, 1))
        assert sent(planner.plan.advance(chunk(40, (4, 5, 6)), 1)) == [([4], [0], 1)]

    def test_groups_are_ordered_each_by_its_block_size(self) -> None:
        planner = Planner((16, 8))
        planner.reserve(1, (0, 3), (2, 3))
        first = planner.plan.advance(chunk(24, (1, 2), (11, 12, 13)), 1)
        assert [order.group_index for order in first] == [0, 1]
        assert sent(first) == [([1], [0], 1), ([13], [0], 1)]
        last = planner.plan.advance(chunk(40, (3,), (14, 15)), 2)
        assert sent(last) == [([2, 3], [1, 2], 2), ([14, 15], [1, 2], 2)]

    def test_each_d_is_ordered_its_own(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.reserve(2, (1, 2))
        orders = planner.plan.advance(chunk(40, (6,)), 2)
        by_reservation = {o.reservation.message.reservation: o.src_blocks for o in orders}
        assert by_reservation == {1: [5, 6], 2: [5, 6]}

    def test_transfers_do_not_mix(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2, transfer_id="u")
        orders = planner.plan.advance(chunk(40, (7, 8, 9), production=8, transfer_id="u"), 1)
        assert [order.reservation.message.reservation for order in orders] == [2]

    def test_repeated_reserve_orders_nothing_again(self, planner: Planner) -> None:
        planner.plan.advance(chunk(40, (4, 5, 6)), 1)
        assert len(planner.reserve()) == 1
        assert planner.reserve() == []

    def test_reserve_of_other_groups_is_ignored(self, planner: Planner) -> None:
        planner.plan.advance(chunk(40, (4, 5, 6)), 1)
        assert planner.reserve(1, (0, 3), (0, 3)) == []


class TestDone:
    def test_only_what_is_ordered_and_has_ended_is_done(self, planner: Planner) -> None:
        planner.reserve()
        (first,) = planner.plan.advance(chunk(20, (4, 5)), 1)
        reservation = first.reservation
        reservation.num_open -= 1
        assert not planner.plan.is_done(reservation)
        planner.plan.advance(chunk(40, (6,)), 2)
        assert not planner.plan.is_done(reservation)
        reservation.num_open -= 1
        assert planner.plan.is_done(reservation)
        reservation.is_over = True
        assert not planner.plan.is_done(reservation)


class TestParked:
    """Reservations that come before P knows the prompt."""

    def test_parked_ones_take_part_from_the_first_chunk_on(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2, (1, 1))
        planner.reserve(1)
        assert planner.plan.num_parked == 1
        assert len(planner.plan.advance(chunk(40, (4, 5, 6)), 1)) == 2
        assert planner.plan.num_parked == 0

    def test_oldest_transfer_makes_room(
        self, planner: Planner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plan_module, "MAX_PARKED", 2)
        for number, name in enumerate("abc"):
            planner.reserve(number, transfer_id=name)
        planner.reserve(9, transfer_id="c")
        assert planner.plan.num_parked == 2
        served = [
            len(planner.plan.advance(chunk(40, (4, 5, 6), production=p, transfer_id=name), p))
            for p, name in enumerate("abc", 1)
        ]
        assert served == [0, 1, 2]

    def test_reservations_of_one_transfer_are_bounded(self, planner: Planner) -> None:
        for number in range(MAX_PER_TRANSFER + 1):
            planner.reserve(number)
        assert len(planner.plan.advance(chunk(40, (4, 5, 6)), 1)) == MAX_PER_TRANSFER
        assert planner.reserve(1000) == []


class TestCancel:
    def test_cancelled_while_parked_leaves_nothing(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.plan.cancel("t", 1)
        assert planner.plan.num_parked == 0
        assert planner.plan.advance(chunk(40, (4, 5, 6)), 1) == []

    def test_cancelled_one_is_ordered_no_more_and_never_done(self, planner: Planner) -> None:
        planner.reserve()
        (order,) = planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.cancel("t", 1)
        assert planner.plan.advance(chunk(40, (6,)), 2) == []
        order.reservation.num_open = 0
        assert order.reservation.is_over
        assert not planner.plan.is_done(order.reservation)

    def test_reserve_that_the_cancel_overtook_does_not_open_it_again(
        self, planner: Planner
    ) -> None:
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.reserve()
        planner.plan.cancel("t", 1)
        assert planner.reserve() == []
        assert planner.plan.advance(chunk(40, (6,)), 2) == []

    def test_cancel_of_one_leaves_the_others(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2)
        planner.plan.cancel("t", 1)
        planner.plan.cancel("t", 9)
        planner.plan.cancel("unknown", 2)
        (order,) = planner.plan.advance(chunk(40, (4, 5, 6)), 1)
        assert order.reservation.message.reservation == 2


class TestLose:
    def test_lost_ones_are_returned_and_parked_ones_forgotten(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2)
        planner.reserve(3, transfer_id="parked")
        planner.plan.advance(chunk(16, (4,)), 1)
        planner.plan.cancel("t", 2)
        lost = planner.plan.lose(lambda reservation: reservation.message.cluster_id == 0xD)
        assert {reservation.message.reservation for reservation in lost} == {1, 3}
        assert planner.plan.num_parked == 0

    def test_others_stay(self, planner: Planner) -> None:
        planner.reserve(1)
        assert planner.plan.lose(lambda reservation: False) == []
        assert planner.plan.num_parked == 1


class TestVoid:
    def test_void_loses_what_is_under_way_once(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2)
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.cancel("t", 2)
        lost = planner.plan.void(7)
        assert [r.message.reservation for r in lost] == [1]
        assert all(r.is_over for r in lost)
        assert (planner.plan.void(7), planner.plan.num_prefills) == ([], 0)

    def test_void_of_an_unknown_production_loses_nothing(self, planner: Planner) -> None:
        planner.reserve(1)
        assert planner.plan.void(7) == []
        assert planner.plan.num_parked == 1

    def test_next_production_is_sent_from_its_beginning_to_new_reservations(
        self, planner: Planner
    ) -> None:
        planner.reserve(1)
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.void(7)
        planner.reserve(2)
        (order,) = planner.plan.advance(chunk(40, (8, 9, 10), production=8), 2)
        assert sent([order]) == [([8, 9, 10], [0, 1, 2], 2)]
        assert (order.reservation.message.reservation, order.reservation.production) == (2, 8)

    def test_late_void_does_not_touch_the_next_production(self, planner: Planner) -> None:
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.advance(chunk(20, (8, 9), production=8), 2)
        planner.reserve()
        assert planner.plan.void(7) == []
        assert len(planner.plan.advance(chunk(40, (10,), production=8), 3)) == 1


class TestStepThatNeverEnded:
    def test_reservations_of_its_prompts_are_lost_and_no_others(self, planner: Planner) -> None:
        planner.reserve(1)
        planner.reserve(2, transfer_id="u")
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.advance(chunk(20, (8, 9), production=8, transfer_id="u"), 2)
        lost = planner.plan.void_step(2)
        assert [r.message.reservation for r in lost] == [2]

    def test_later_reservation_is_not_sent_what_was_never_computed(self, planner: Planner) -> None:
        planner.plan.advance(chunk(20, (4, 5)), 1)
        planner.plan.void_step(1)
        assert planner.reserve(1) == []
        assert planner.plan.advance(chunk(40, (6,)), 2) == []
        assert planner.reserve(2) == []


class EveryBlockOnce(RuleBasedStateMachine):
    """Chunks, reservations, cancels and voids in any order, beside a naive model of them."""

    @initialize(
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2),
        num_tokens=st.integers(1, 30),
    )
    def start(self, sizes: list[int], num_tokens: int) -> None:
        self.sizes, self.num_tokens = sizes, num_tokens
        self.plan = PushPlan(sizes)
        self.generation = 0
        self.next_block = 1
        self.new_production()
        self.next_reservation = 1
        self.wanted: dict[int, list[tuple[int, int]]] = {}
        self.got: dict[int, dict[tuple[int, int], int]] = {}
        """By reservation: group and position to P's block."""
        self.over: set[int] = set()
        self.objects: dict[int, Reservation] = {}

    def new_production(self) -> None:
        self.production = getattr(self, "production", 0) + 1
        self.end = 0
        self.blocks: list[list[int]] = [[] for _ in self.sizes]
        self.whole_in: list[list[int]] = [[] for _ in self.sizes]
        """Per group and block: the generation that filled it."""

    @precondition(lambda self: self.end < self.num_tokens)
    @rule(data=st.data())
    def p_computes_a_chunk(self, data: st.DataObject) -> None:
        self.generation += 1
        self.end = data.draw(st.integers(self.end + 1, self.num_tokens))
        new: list[tuple[int, ...]] = []
        for group, size in enumerate(self.sizes):
            num_blocks = -(-self.end // size)
            count = num_blocks - len(self.blocks[group])
            ids = tuple(range(self.next_block, self.next_block + count))
            self.next_block += count
            self.blocks[group].extend(ids)
            new.append(ids)
            is_last = self.end == self.num_tokens
            whole = num_blocks if is_last else self.end // size
            self.whole_in[group] += [self.generation] * (whole - len(self.whole_in[group]))
        part = PrefillChunk("t", self.production, self.num_tokens, tuple(new), self.end)
        self.take(self.plan.advance(part, self.generation))

    @rule(data=st.data())
    def d_reserves(self, data: st.DataObject) -> None:
        number, self.next_reservation = self.next_reservation, self.next_reservation + 1
        spans = []
        for size in self.sizes:
            last = -(-self.num_tokens // size)
            first = data.draw(st.integers(0, last - 1))
            spans.append((first, data.draw(st.integers(0, last - first))))
        self.wanted[number], self.got[number] = spans, {}
        self.take(self.plan.reserve(make_reserve(number, *spans), ignore, 0.0))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def d_repeats_itself(self, data: st.DataObject) -> None:
        """Not a parked one that was cancelled: of those nothing is remembered."""
        live = sorted(self.wanted.keys() - (self.over - self.objects.keys()))
        if live:
            number = data.draw(st.sampled_from(live))
            if self.objects.get(number) is None or self.end:
                spans = self.wanted[number]
                is_of_now = number not in self.over or (
                    self.objects[number].production == self.production
                )
                if is_of_now:
                    self.take(self.plan.reserve(make_reserve(number, *spans), ignore, 0.0))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def d_cancels(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.wanted)))
        self.plan.cancel("t", number)
        self.over.add(number)

    @precondition(lambda self: self.end)
    @rule()
    def p_preempts(self) -> None:
        lost = {r.message.reservation for r in self.plan.void(self.production)}
        assert lost == self.wanted.keys() - self.over
        self.over |= lost
        self.new_production()

    @invariant()
    def what_can_be_sent_has_been_ordered(self) -> None:
        for number, spans in getattr(self, "wanted", {}).items():
            if number in self.over:
                continue
            expected = {
                (group, position): self.blocks[group][position]
                for group, (first, count) in enumerate(spans)
                for position in range(first, first + count)
                if position < len(self.whole_in[group])
            }
            assert self.got[number] == expected

    def take(self, orders: list[Order]) -> None:
        for order in orders:
            number = order.reservation.message.reservation
            assert number not in self.over
            self.objects[number] = order.reservation
            first, _ = self.wanted[number][order.group_index]
            for block, place in zip(order.src_blocks, order.dst_positions, strict=True):
                key = (order.group_index, first + place)
                assert key not in self.got[number], "a block was ordered twice"
                self.got[number][key] = block
                filled = self.whole_in[order.group_index][first + place]
                # No block leaves before its step has computed it.
                assert order.generation == filled or (
                    order.generation == SETTLED and filled < self.generation
                )


TestEveryBlockOnce = EveryBlockOnce.TestCase
TestEveryBlockOnce.settings = settings(max_examples=60)
