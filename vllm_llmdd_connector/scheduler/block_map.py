"""From a request's block tables to the block indices of a transfer, per KV cache group. Pure."""

from collections.abc import Sequence

from vllm_llmdd_connector.errors import TransferError
from vllm_llmdd_connector.layout.blocks import NULL_BLOCK, GroupBlocks, WantedBlocks


def prompt_blocks(
    block_ids: Sequence[Sequence[int]], block_sizes: Sequence[int], num_tokens: int
) -> tuple[tuple[int, ...], ...]:
    """P's blocks that hold the first ``num_tokens`` tokens, per group.

    Cuts off what lies behind the prompt: lookahead blocks of speculative decoding (vLLM 0.23 passes
    them) and blocks of generated tokens.
    """
    return tuple(
        tuple(ids[: -(-num_tokens // size)])
        for ids, size in zip(block_ids, block_sizes, strict=True)
    )


def final_blocks(num_tokens: int, block_sizes: Sequence[int], goes_on: bool) -> tuple[int, ...]:
    """Per group: leading blocks of a prompt to which nothing is written once they are computed.

    ``goes_on``: P writes behind the prompt, into a last block that is not full.
    """
    return tuple(num_tokens // size if goes_on else -(-num_tokens // size) for size in block_sizes)


def map_blocks(
    src_block_ids: Sequence[Sequence[int]],
    dst_block_ids: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    num_local_tokens: int,
    num_tokens: int,
) -> list[GroupBlocks]:
    """The block pairs that bring tokens [num_local_tokens, num_tokens) from P to D, per group.

    Args:
        src_block_ids: P's blocks of the prompt per group, from position 0.
        dst_block_ids: D's block table of the request per group, from position 0.
        block_sizes: tokens in a block, per group.
        num_local_tokens: D's local prefix hit, block aligned; not transferred.
        num_tokens: prompt length.

    Pairs whose destination is the null block are left out: D does not want them.

    Raises:
        TransferError: a block that D wants is missing at P, or a table is too short.
    """
    if len(src_block_ids) != len(block_sizes) or len(dst_block_ids) != len(block_sizes):
        raise TransferError(
            f"KV cache groups differ: local {len(dst_block_ids)}, peer {len(src_block_ids)}, "
            f"expected {len(block_sizes)}"
        )
    return [
        _map_group(index, src, dst, size, num_local_tokens, num_tokens)
        for index, (src, dst, size) in enumerate(
            zip(src_block_ids, dst_block_ids, block_sizes, strict=True)
        )
    ]


def wanted_blocks(
    dst_block_ids: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    num_local_tokens: int,
    num_tokens: int,
) -> list[WantedBlocks]:
    """D's blocks for tokens [num_local_tokens, num_tokens), per group; arguments as ``map_blocks``.

    Raises:
        TransferError: a table is too short.
    """
    if len(dst_block_ids) != len(block_sizes):
        raise TransferError(
            f"KV cache groups differ: local {len(dst_block_ids)}, expected {len(block_sizes)}"
        )
    return [
        _wanted_of_group(index, ids, size, num_local_tokens, num_tokens)
        for index, (ids, size) in enumerate(zip(dst_block_ids, block_sizes, strict=True))
    ]


def _wanted_of_group(
    index: int, dst_ids: Sequence[int], block_size: int, num_local_tokens: int, num_tokens: int
) -> WantedBlocks:
    first, last = num_local_tokens // block_size, -(-num_tokens // block_size)
    if len(dst_ids) < last:
        raise TransferError(
            f"KV cache group {index} needs blocks [{first}, {last}) of the prompt, "
            f"but this server has {len(dst_ids)}"
        )
    # vLLM drops blocks from the left only, so the holes are a prefix of the table.
    while first < last and dst_ids[first] == NULL_BLOCK:
        first += 1
    dst = list(dst_ids[first:last])
    if NULL_BLOCK in dst:
        raise TransferError(f"KV cache group {index} has a hole behind its first block: {dst}")
    return WantedBlocks(dst, first)


def _map_group(
    index: int,
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    block_size: int,
    num_local_tokens: int,
    num_tokens: int,
) -> GroupBlocks:
    dst, first = _wanted_of_group(index, dst_ids, block_size, num_local_tokens, num_tokens)
    last = first + len(dst)
    if len(src_ids) < last:
        raise TransferError(
            f"KV cache group {index} needs blocks [{first}, {last}) of the prompt, "
            f"but the peer has {len(src_ids)} and this server {len(dst_ids)}"
        )
    src = list(src_ids[first:last])
    if NULL_BLOCK in src:
        raise TransferError(
            f"KV cache group {index}: the prefill server has dropped a block that is wanted here "
            f"(blocks [{first}, {last}) of the prompt)"
        )
    return GroupBlocks(src, dst, first)
