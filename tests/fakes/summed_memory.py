"""KV memory of two caches, to be summed."""

from __future__ import annotations

import ctypes

from vllm_llmdd_connector.layout.kv_layout import CachePlan, Region
from vllm_llmdd_connector.worker.checksum import BlockReader, Place

NUM_BLOCKS, BLOCK_LEN = 6, 96


class SummedMemory:
    """Two caches of one group, of two regions and one; every block differs."""

    def __init__(self) -> None:
        self.buffers = [
            ctypes.create_string_buffer(
                bytes((i * 7 + 31 * number + i // BLOCK_LEN) % 251 for i in range(size)), size
            )
            for number, size in enumerate([NUM_BLOCKS * BLOCK_LEN] * 3)
        ]
        regions = [
            Region(f"r{number}", ctypes.addressof(buffer), BLOCK_LEN)
            for number, buffer in enumerate(self.buffers)
        ]
        self.plans = [
            CachePlan(0, 0, NUM_BLOCKS, BLOCK_LEN, tuple(regions[:2])),
            CachePlan(1, 0, NUM_BLOCKS, BLOCK_LEN, tuple(regions[2:])),
        ]

    def sums(self, *blocks: int, reverse: bool = False) -> list[int]:
        """Of these blocks as positions 0, 1, … over all regions."""
        reader, sums = BlockReader(self.plans), dict[Place, int]()
        places = {(0, position): block for position, block in enumerate(blocks)}
        parts = [(plan, index) for plan in self.plans for index in range(len(plan.regions))]
        for plan, index in reversed(parts) if reverse else parts:
            assert reader.add(plan, index, places, sums, lambda: False)
        return [sums[0, position] for position in range(len(blocks))]

    def flip(self, region: int, block: int, offset: int) -> None:
        place = block * BLOCK_LEN + offset
        self.buffers[region][place] = bytes([self.buffers[region][place][0] ^ 1])

    def swap_regions(self) -> None:
        first, second = self.buffers[0].raw, self.buffers[1].raw
        self.buffers[0].raw, self.buffers[1].raw = second, first
