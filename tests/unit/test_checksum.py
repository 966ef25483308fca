"""Checksums of blocks: which ones are chosen, and what a sum tells apart."""

from __future__ import annotations

import ctypes
import itertools
from typing import Literal

import pytest
from fakes.summed_memory import BLOCK_LEN, NUM_BLOCKS, SummedMemory

from vllm_llmdd_connector.scheduler.block_map import final_blocks
from vllm_llmdd_connector.worker.checksum import (
    SAMPLE_STRIDE,
    SUM_BYTES,
    BlockReader,
    Place,
    chosen,
    pack,
    unpack,
)


@pytest.fixture
def memory() -> SummedMemory:
    return SummedMemory()


class TestChosen:
    def test_full_takes_every_block(self) -> None:
        assert chosen("full", 7, 3, 4) == [3, 4, 5, 6]

    @pytest.mark.parametrize("policy", ["full", "sample"])
    def test_nothing_has_no_sums(self, policy: Literal["full", "sample"]) -> None:
        assert chosen(policy, 7, 3, 0) == []

    @pytest.mark.parametrize("number", [1, 2**61 + 5, 31])
    @pytest.mark.parametrize("first", [0, 5, 64])
    def test_sample_takes_one_of_sixteen_and_the_last(self, number: int, first: int) -> None:
        count = 10 * SAMPLE_STRIDE
        positions = chosen("sample", number, first, count)
        assert positions[-1] == first + count - 1
        assert len(positions) in (10, 11)
        steps = {b - a for a, b in itertools.pairwise(positions[:-1])}
        assert steps == {SAMPLE_STRIDE}

    def test_every_block_is_in_some_transfer_s_sample(self) -> None:
        numbers = range(1, 2 * SAMPLE_STRIDE, 2)
        seen = {p for number in numbers for p in chosen("sample", number, 0, 40)}
        assert seen == set(range(40))

    def test_a_part_of_a_span_has_the_same_sample(self) -> None:
        """A local hit moves a span's begin: positions are those of the prompt."""
        whole = chosen("sample", 9, 0, 100)
        assert chosen("sample", 9, 50, 50) == [p for p in whole if p >= 50]


class TestFinalBlocks:
    @pytest.mark.parametrize(
        ("num_tokens", "goes_on", "expected"),
        [(32, False, (2, 1)), (32, True, (2, 1)), (33, False, (3, 2)), (33, True, (2, 1))],
    )
    def test_a_last_block_that_is_not_full_is_final_when_p_has_ended(
        self, num_tokens: int, goes_on: bool, expected: tuple[int, int]
    ) -> None:
        assert final_blocks(num_tokens, [16, 32], goes_on) == expected


class TestWire:
    def test_sums_survive(self) -> None:
        sums = (0, 1, 2**64 - 1)
        assert len(pack(sums)) == 3 * SUM_BYTES
        assert unpack(pack(sums)) == sums

    def test_a_rest_is_no_sum(self) -> None:
        assert unpack(pack([5]) + b"\1\2\3") == (5,)

    def test_4096_blocks_take_32_kib(self) -> None:
        assert len(pack(range(4096))) == 32 << 10


class TestSums:
    def test_equal_bytes_have_equal_sums_wherever_they_are(self, memory: SummedMemory) -> None:
        other = SummedMemory()
        for mine, theirs in zip(memory.buffers, other.buffers, strict=True):
            ctypes.memmove(ctypes.byref(theirs, 4 * BLOCK_LEN), ctypes.byref(mine), BLOCK_LEN)
        assert other.sums(4) == memory.sums(0)

    def test_regions_may_come_in_any_order(self, memory: SummedMemory) -> None:
        assert memory.sums(1, 2, reverse=True) == memory.sums(1, 2)

    @pytest.mark.parametrize("region", [0, 1, 2])
    @pytest.mark.parametrize("offset", [0, 50, BLOCK_LEN - 1])
    def test_one_bit_changes_the_sum_of_its_block_only(
        self, memory: SummedMemory, region: int, offset: int
    ) -> None:
        before = memory.sums(*range(NUM_BLOCKS))
        memory.flip(region, 3, offset)
        after = memory.sums(*range(NUM_BLOCKS))
        assert [a != b for a, b in zip(before, after, strict=True)] == [
            block == 3 for block in range(NUM_BLOCKS)
        ]

    def test_swapped_layers_do_not_cancel(self, memory: SummedMemory) -> None:
        before = memory.sums(0)
        memory.swap_regions()
        assert memory.sums(0) != before

    def test_reading_ends_before_the_next_block_when_it_must(self, memory: SummedMemory) -> None:
        answers = iter([False, False, True])
        sums: dict[Place, int] = {}
        blocks = {(0, position): position for position in range(5)}
        reader = BlockReader(memory.plans)
        assert not reader.add(memory.plans[0], 0, blocks, sums, lambda: next(answers))
        assert list(sums) == [(0, 0), (0, 1)]
