"""Random programs of the first generation."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from contract.reference.first_generation import (
    Deallocate,
    PullBlockPairs,
    PullRow,
    RemoveKey,
)
from contract.reference.programs import KEYS, NAMES, Draw, Writer, write_program
from contract.reference.run import Call, Program
from contract.reference.tables import Descriptor
from contract.reference.world import LOCAL, PEER, ByModel


class FirstWriter(Writer):
    """Keys are the PROMPT's, which is the peer; memory of a caller is for `swap_blocks` alone."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw, remote=False)

    def descriptor(self, side: int, is_blocks: bool | None = None) -> Descriptor:
        draw = self._draw
        blocks = draw(st.booleans()) if is_blocks is None else is_blocks
        models = st.sampled_from([0, 1, None])
        desc = Descriptor(
            draw(st.integers(1, 4)) if self.one_in(8) else self._tensors,
            draw(st.integers(1, 5)),
            0 if self.one_in(60) else draw(st.sampled_from(self._sizes)),
            blocks,
            allocated=True,
            keys=() if blocks or side == LOCAL else draw(KEYS),
            model=draw(models) if blocks and side == PEER else None,
            seed=10 * (1 + len(self.caches[side])) + 1000 * side,
        )
        self.caches[side].append(desc)
        return desc

    def mirror(self, desc: Descriptor) -> Descriptor:
        rows, row_bytes = self._draw(st.integers(1, 5)), max(desc.row_bytes, 1)
        other = replace(desc, host=True, allocated=False, registered=False, seed=desc.seed + 500)
        other = replace(other, rows=rows, row_bytes=row_bytes)
        self.caches[LOCAL].append(other)
        return other

    def offset(self, room: int) -> int | None:
        high = room + 1 if self.wild() else max(room - 1, 0)
        return None if self.one_in(2) else self._draw(st.integers(0, high))

    def pull_cache(self) -> Call:
        source = self.slot(PEER, lambda desc: not desc.is_blocks or self.one_in(4))
        desc = self.caches[PEER][source]
        target = self.slot(LOCAL, lambda other: not other.host)
        local = self.caches[LOCAL][target]
        src_offset, dst_offset = self.offset(desc.row_bytes), self.offset(local.row_bytes)
        room = min(desc.row_bytes - (src_offset or 0), local.row_bytes - (dst_offset or 0))
        sizes = st.integers(-2, max(room, 0) + 2) if self.wild() else st.integers(1, max(room, 1))
        fits = desc.row_bytes - (src_offset or 0) >= local.row_bytes - (dst_offset or 0)
        size = -1 if fits and self.one_in(2) else self._draw(sizes)
        key, row = self.row_key(source), self.index(local.rows)
        return PullRow(key, target, row, size, src_offset, dst_offset, self.layers(desc, local))

    def pull_blocks(self) -> Call:
        target = self.slot(LOCAL, lambda other: not other.host)
        local = self.caches[LOCAL][target]
        source = self.slot(PEER, lambda d: d.model is not None and d.row_bytes == local.row_bytes)
        desc = self.caches[PEER][source]
        count = self._draw(st.integers(1, 6))
        src, dst = self.blocks(count, desc.rows), self.blocks(count, local.rows)
        key = ByModel(desc.model or 0, self.cluster())
        return PullBlockPairs(key, target, src, dst, self.layers(desc, local))

    def discard(self) -> Call:
        side = self._draw(st.sampled_from([LOCAL, PEER]))
        return Deallocate(side, self.slot(side, lambda desc: desc.allocated))

    def remove_key(self) -> Call:
        names = [name for desc in self.caches[PEER] for name in desc.keys if name is not None]
        return RemoveKey(self._draw(st.sampled_from(names) if names else NAMES))


@st.composite
def first_programs(draw: Draw, kinds: tuple[str, ...]) -> Program:
    return write_program(draw, FirstWriter(draw), kinds)
