"""Run merging: fewer pieces, the same bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.datadist._engine import EngineError, testing

BLOCKS = st.integers(0, 40)
# Lists with many consecutive stretches, where merging has something to do.
STRETCHES = st.lists(st.tuples(BLOCKS, BLOCKS, st.integers(1, 8)), max_size=12)


def expand(runs: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    return [(src + i, dst + i) for src, dst, count in runs for i in range(count)]


@given(STRETCHES)
def test_runs_name_the_same_pairs_in_the_same_order(stretches: list[tuple[int, int, int]]) -> None:
    pairs = expand(stretches)
    runs = testing.merge_blocks([src for src, _ in pairs], [dst for _, dst in pairs])
    assert expand(runs) == pairs


@given(STRETCHES)
def test_no_two_neighbouring_runs_could_be_one(stretches: list[tuple[int, int, int]]) -> None:
    pairs = expand(stretches)
    runs = testing.merge_blocks([src for src, _ in pairs], [dst for _, dst in pairs])
    for (src, dst, count), (next_src, next_dst, _) in pairwise(runs):
        assert (src + count, dst + count) != (next_src, next_dst)


def test_consecutive_on_one_side_only_stays_apart() -> None:
    assert testing.merge_blocks([1, 2], [5, 7]) == [(1, 5, 1), (2, 7, 1)]
    assert testing.merge_blocks([2, 1], [5, 6]) == [(2, 5, 1), (1, 6, 1)]


@given(
    offset=st.integers(0, 1000),
    row_bytes=st.integers(1, 500),
    block_bytes=st.integers(1, 64),
    data=st.data(),
)
def test_row_chunks_cover_the_row(
    offset: int, row_bytes: int, block_bytes: int, data: st.DataObject
) -> None:
    chunks = -(-row_bytes // block_bytes)
    dst = data.draw(st.lists(st.integers(0, 1000), max_size=chunks, unique=True))
    wanted = {}
    for i, block in enumerate(dst):
        length = min(block_bytes, row_bytes - i * block_bytes)
        for byte in range(length):
            wanted[block * block_bytes + byte] = offset + i * block_bytes + byte
    got = {
        dst_offset + byte: src_offset + byte
        for src_offset, dst_offset, length in testing.row_to_blocks(
            offset, row_bytes, block_bytes, dst
        )
        for byte in range(length)
    }
    assert got == wanted


def test_more_blocks_than_chunks_are_refused() -> None:
    with pytest.raises(EngineError, match="3 destination blocks for a row of 2 chunks"):
        testing.row_to_blocks(0, 100, 64, [0, 1, 2])
