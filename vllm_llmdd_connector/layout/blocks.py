"""Blocks of a request, per KV cache group, as both sides of a transfer name them."""

from typing import NamedTuple

NULL_BLOCK = 0
"""vLLM's block 0: a hole in a table (out of a sliding window), never data."""


class GroupBlocks(NamedTuple):
    """What to copy for one KV cache group; the two lists are aligned."""

    src_blocks: list[int]
    dst_blocks: list[int]
    first_position: int
    """Position in the prompt, in blocks, of the first block of the range."""


class WantedBlocks(NamedTuple):
    """What D wants of one KV cache group."""

    dst_blocks: list[int]
    first_position: int
    """Position in the prompt, in blocks, of the first one."""
