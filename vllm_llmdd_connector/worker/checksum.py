"""Option ``integrity``: which blocks of a transfer have a checksum, and how it is computed.

Both sides use this file alike. A block's sum is one number of 64 bits over all its regions: xxh3 of
each region's bytes, seeded with the region's number in its rank, combined by exclusive or. So
regions can be summed in any order and at any time, two that are swapped do not cancel, and 4,096
blocks take 32 KiB on the wire however many layers they have. It finds what breaks by itself, as
memory and copies do; against somebody who forges blocks there are the keys.
"""

import ctypes
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from xxhash import xxh3_64_intdigest

from vllm_llmdd_connector.layout.kv_layout import CachePlan

Policy = Literal["off", "sample", "full"]
Place = tuple[int, int]
"""KV cache group, and position in the prompt in blocks."""

SAMPLE_STRIDE = 16
"""``sample`` takes one of so many blocks, and the last one."""
SUM_BYTES = 8
_TURN_BYTES = 2 << 20
"""xxhash keeps the GIL for blocks of less than about 100 kB. Others, the forward first of all, get
it after so many bytes, 0.2 ms; the pause costs 0.05 ms, and a shorter one hands nothing over."""


def chosen(policy: Policy, number: int, first: int, count: int) -> list[int]:
    """The positions among ``[first, first + count)`` that have a sum.

    ``number``: of the transfer, drawn by D; its lowest bit is always set and says nothing.
    """
    end = first + count
    if policy == "full":
        return list(range(first, end))
    offset = (number >> 1) % SAMPLE_STRIDE
    return [p for p in range(first, end) if p % SAMPLE_STRIDE == offset or p == end - 1]


def pack(sums: Iterable[int]) -> bytes:
    """Sums as they travel: 8 bytes each, little-endian."""
    values = tuple(sums)
    return struct.pack(f"<{len(values)}Q", *values)


def unpack(data: bytes) -> tuple[int, ...]:
    """The inverse of ``pack``; a rest of less than 8 bytes is left out."""
    return struct.unpack_from(f"<{len(data) // SUM_BYTES}Q", data)


class BlockReader:
    """Sums blocks of the registered KV memory in place. It has no state: any thread may use it.

    The memory belongs to vLLM and has to outlive this.
    """

    def __init__(self, plans: Sequence[CachePlan]) -> None:
        self._regions: dict[tuple[int, int], tuple[memoryview, int]] = {}
        for plan in plans:
            size = plan.num_blocks * plan.block_len
            for index, region in enumerate(plan.regions):
                view = memoryview((ctypes.c_char * size).from_address(region.base)).cast("B")
                self._regions[plan.model_id, index] = view, len(self._regions)

    def add(
        self,
        plan: CachePlan,
        region: int,
        blocks: Mapping[Place, int],
        sums: dict[Place, int],
        must_end: Callable[[], bool],
    ) -> bool:
        """Combine one region of these blocks into ``sums``; False if ``must_end`` came first.

        ``blocks``: block ids in this memory. Other threads get the GIL in between.
        """
        view, seed = self._regions[plan.model_id, region]
        length = plan.block_len
        num_bytes = 0
        for place, block in blocks.items():
            if must_end():
                return False
            part = xxh3_64_intdigest(view[block * length : (block + 1) * length], seed)
            sums[place] = sums.get(place, 0) ^ part
            num_bytes += length
            if num_bytes >= _TURN_BYTES:
                num_bytes = 0
                time.sleep(0)
        return True
