"""vLLM's ``BlockPool`` as far as the connector uses it: blocks with reference counts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass
class FakeBlock:
    block_id: int
    ref_cnt: int = 0


class FakeBlockPool:
    """Records what the connector takes and gives back, and allows it on its own thread only.

    vLLM's own references, those of requests, come and go by ``allocate`` and ``end_request``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [FakeBlock(block_id) for block_id in range(num_blocks)]
        self.touched: list[int] = []
        self.freed: list[int] = []
        self._thread = threading.get_ident()

    @property
    def in_use(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.ref_cnt]

    def ref_counts(self, block_ids: Iterable[int]) -> list[int]:
        return [self.blocks[block_id].ref_cnt for block_id in block_ids]

    def allocate(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].ref_cnt += 1

    def end_request(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.blocks[block_id].ref_cnt -= 1

    def touch(self, blocks: Sequence[FakeBlock]) -> None:
        self._check_thread()
        for block in blocks:
            assert block.block_id, "the null block was touched"
            assert block.ref_cnt, f"block {block.block_id} was touched after vLLM had freed it"
            block.ref_cnt += 1
            self.touched.append(block.block_id)

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        self._check_thread()
        for block in ordered_blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)
            held = self.touched.count(block.block_id) - self.freed.count(block.block_id)
            assert held >= 0, f"block {block.block_id} was freed once too often"

    def reset_prefix_cache(self) -> bool:
        """As vLLM's: not while a block is in use."""
        self._check_thread()
        return not self.in_use

    def _check_thread(self) -> None:
        assert threading.get_ident() == self._thread, "vLLM's blocks changed on a foreign thread"
