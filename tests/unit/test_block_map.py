"""``block_map``: against a model that goes token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK, GroupBlocks
from vllm_llmdd_connector.scheduler.block_map import map_blocks, prompt_blocks, wanted_blocks


def naive_pairs(
    src: list[int], dst: list[int], size: int, num_local_tokens: int, num_tokens: int
) -> list[tuple[int, int]] | None:
    """Block pairs token by token; None where a wanted block is missing on either side."""
    pairs: list[tuple[int, int]] = []
    for token in range(num_local_tokens, num_tokens):
        position = token // size
        if position >= len(src) or position >= len(dst):
            return None
        if dst[position] == NULL_BLOCK:
            continue
        if src[position] == NULL_BLOCK:
            return None
        pair = (src[position], dst[position])
        if pair not in pairs:
            pairs.append(pair)
    return pairs


def tables(first_id: int) -> st.SearchStrategy[list[int]]:
    """A block table: holes on the left, as out of a sliding window, then distinct blocks."""
    return st.tuples(st.integers(0, 4), st.integers(0, 8)).map(
        lambda sizes: [NULL_BLOCK] * sizes[0] + list(range(first_id, first_id + sizes[1]))
    )


@given(
    src=tables(1),
    dst=tables(101),
    size=st.integers(1, 5),
    num_local_blocks=st.integers(0, 8),
    num_tokens=st.integers(1, 40),
)
def test_pairs_are_those_of_the_model(
    src: list[int], dst: list[int], size: int, num_local_blocks: int, num_tokens: int
) -> None:
    num_local_tokens = min(num_local_blocks * size, (num_tokens - 1) // size * size)
    expected = naive_pairs(src, dst, size, num_local_tokens, num_tokens)
    try:
        (group,) = map_blocks([src], [dst], [size], num_local_tokens, num_tokens)
    except TransferError:
        assert expected is None
        return
    assert list(zip(group.src_blocks, group.dst_blocks, strict=True)) == expected
    for index, block in enumerate(group.dst_blocks):
        assert dst[group.first_position + index] == block


def test_groups_of_different_block_sizes_are_mapped_each_for_itself() -> None:
    full, window = map_blocks(
        [[1, 2, 3, 4], [0, 6]], [[11, 12, 13, 14, 15], [0, 16]], [4, 8], 8, 14
    )
    assert full == GroupBlocks([3, 4], [13, 14], 2)
    assert window == GroupBlocks([6], [16], 1)


def test_group_wholly_out_of_the_window_needs_nothing() -> None:
    (group,) = map_blocks([[0, 0]], [[0, 0]], [4], 0, 8)
    assert group.src_blocks == group.dst_blocks == []


def test_block_that_p_has_dropped_but_d_wants_is_refused() -> None:
    with pytest.raises(TransferError, match=r"group 0: the prefill server has dropped .*\[1, 3\)"):
        map_blocks([[0, 0, 3]], [[0, 12, 13]], [4], 0, 12)


def test_hole_in_the_middle_of_d_s_table_is_refused() -> None:
    with pytest.raises(TransferError, match="hole"):
        map_blocks([[1, 2, 3]], [[11, 0, 13]], [4], 0, 12)


def test_short_table_is_refused_with_both_lengths() -> None:
    with pytest.raises(TransferError, match=r"\[0, 3\) .* peer has 2 and this server 3"):
        map_blocks([[1, 2]], [[11, 12, 13]], [4], 0, 12)


@pytest.mark.parametrize(("src", "dst"), [([], [[1]]), ([[1]], []), ([[1], [1]], [[1]])])
def test_other_number_of_groups_is_refused(src: list[list[int]], dst: list[list[int]]) -> None:
    with pytest.raises(TransferError, match="KV cache groups differ"):
        map_blocks(src, dst, [4], 0, 4)


@given(num_tokens=st.integers(1, 50), size=st.integers(1, 9), num_blocks=st.integers(0, 60))
def test_prompt_blocks_are_cut_to_the_prompt(num_tokens: int, size: int, num_blocks: int) -> None:
    ids = list(range(1, num_blocks + 1))
    (kept,) = prompt_blocks([ids], [size], num_tokens)
    wanted = len({token // size for token in range(num_tokens)})
    assert list(kept) == ids[:wanted]


@given(
    dst=tables(100),
    size=st.integers(1, 5),
    num_local_blocks=st.integers(0, 9),
    num_more=st.integers(1, 40),
)
def test_wanted_blocks_are_those_that_a_pull_would_fill(
    dst: list[int], size: int, num_local_blocks: int, num_more: int
) -> None:
    """P holds everything; D's table alone decides."""
    start = num_local_blocks * size
    end = start + num_more
    pairs = naive_pairs(list(range(1, 60)), dst, size, start, end)
    if pairs is None:
        with pytest.raises(TransferError, match="but this server has"):
            wanted_blocks([dst], [size], start, end)
        return
    (wanted,) = wanted_blocks([dst], [size], start, end)
    assert wanted.dst_blocks == [block for _, block in pairs]
    if pairs:
        assert dst[wanted.first_position] == wanted.dst_blocks[0]


def test_wanted_blocks_of_another_number_of_groups_are_refused() -> None:
    with pytest.raises(TransferError, match="local 1, expected 2"):
        wanted_blocks([[1]], [4, 4], 0, 4)


def test_hole_between_wanted_blocks_is_refused() -> None:
    """A position would name another block than P thinks."""
    with pytest.raises(TransferError, match="has a hole behind its first block"):
        wanted_blocks([[11, 0, 13]], [4], 0, 12)
