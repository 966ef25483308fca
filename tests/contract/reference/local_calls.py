"""`copy_cache`, `copy_blocks` and `swap_blocks`, inside the test's own process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.reference.tables import INVALID, MISSING, UNREGISTERED, Codes, ModelCache, Refusals
from contract.reference.world import LOCAL, World


@dataclass(frozen=True)
class CopyCache:
    dst: int
    src: int
    dst_row: int = 0
    src_row: int = 0
    offset: int = 0
    size: int = -1

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        source, target = world.local(self.src), world.local(self.dst)
        for slot in (self.src, self.dst):
            desc = world.slot(LOCAL, slot).desc
            wrong.when(desc.host if world.rows_are_blocks else desc.is_blocks, INVALID)
        wrong.when(self.size == 0 or self.size < -1, INVALID)
        wrong.when(source is None or target is None, MISSING)
        if source is None or target is None:
            return frozenset(wrong)
        shorter = min(source.desc.row_bytes, target.desc.row_bytes)
        size = source.desc.row_bytes - self.offset if self.size == -1 else self.size
        wrong.when(source.desc.tensors != target.desc.tensors, INVALID)
        wrong.when(self.src_row >= source.desc.rows, INVALID)
        wrong.when(self.dst_row >= target.desc.rows, INVALID)
        wrong.when(self.offset >= shorter or self.offset + size > shorter, INVALID)
        if wrong:
            return frozenset(wrong)
        for tensor in range(source.desc.tensors):
            piece = source.row(tensor, self.src_row)[self.offset : self.offset + size]
            target.write(tensor, self.dst_row, piece, self.offset)
        return frozenset()

    def perform(self, run: Any) -> None:
        run.manager.copy_cache(
            run.cache(self.dst),
            run.cache(self.src),
            self.dst_row,
            self.src_row,
            self.offset,
            self.size,
        )


@dataclass(frozen=True)
class CopyBlocks:
    slot: int
    pairs: tuple[tuple[int, tuple[int, ...]], ...]

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.local(self.slot)
        desc = world.slot(LOCAL, self.slot).desc
        wrong.when(desc.host if world.rows_are_blocks else not desc.is_blocks, INVALID)
        wrong.when(cache is None, MISSING)
        if cache is None:
            return frozenset(wrong)
        for src, copies in dict(self.pairs).items():
            # A source with no copies is not looked at.
            wrong.when(any(max(src, dst) >= cache.desc.rows for dst in copies), INVALID)
        if wrong:
            return frozenset(wrong)
        for src, copies in dict(self.pairs).items():
            for dst in copies:
                for tensor in range(cache.desc.tensors):
                    cache.write(tensor, dst, cache.row(tensor, src))
        return frozenset()

    def perform(self, run: Any) -> None:
        mapping = {src: list(copies) for src, copies in self.pairs}
        run.manager.copy_blocks(run.cache(self.slot), mapping)


@dataclass(frozen=True)
class SwapBlocks:
    src: int
    dst: int
    pairs: tuple[tuple[int, int], ...]

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        mapping = dict(self.pairs)
        descs = [world.slot(LOCAL, slot).desc for slot in (self.src, self.dst)]
        for desc in descs:
            wrong.when(not desc.is_blocks and not world.rows_are_blocks, INVALID)
        wrong.when(descs[0].host == descs[1].host, INVALID)
        source, target = self._open(world, self.src), self._open(world, self.dst)
        wrong.when(source is None or target is None, MISSING)
        if source is None or target is None:
            return frozenset(wrong)
        wrong.when(source.desc.row_bytes != target.desc.row_bytes, INVALID)
        wrong.when(source.desc.tensors != target.desc.tensors, INVALID)
        wrong.when(any(block >= source.desc.rows for block in mapping), INVALID)
        wrong.when(any(block >= target.desc.rows for block in mapping.values()), INVALID)
        if wrong:
            return frozenset(wrong)
        for src, dst in mapping.items():
            for tensor in range(source.desc.tensors):
                target.write(tensor, dst, source.row(tensor, src))
        return frozenset()

    @staticmethod
    def _open(world: World, slot: int) -> ModelCache | None:
        """Memory that was never registered may be given, too."""
        made = world.slot(LOCAL, slot)
        return made.cache if made.id == UNREGISTERED else world.local(slot)

    def perform(self, run: Any) -> None:
        run.manager.swap_blocks(run.cache(self.src), run.cache(self.dst), dict(self.pairs))
