"""The first generation's `KvCacheManager`: what differs from the second. LOCAL is its DECODER.

A cache is allocated, never registered. A blocks cache is one whose rows are blocks, so calls about
rows take it, too. Pulls have offsets; one with an offset leaves the key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from contract.reference.run import Run
from contract.reference.tables import (
    FINE,
    INVALID,
    MISSING,
    POOL_PAGES,
    UNLINKED,
    Codes,
    Descriptor,
    ModelCache,
    Refusals,
    RowName,
    Tables,
)
from contract.reference.world import (
    EVERY_LAYER,
    LOCAL,
    PEER,
    ByModel,
    ByName,
    ByPosition,
    Key,
    Layers,
    World,
    check_layers,
    select,
    select_both,
)

NO_MEMORY = "LLM_DEVICE_OUT_OF_MEMORY"
KEY_IN_USE = "LLM_FAILED"  # the engine's own code has no name in Python
PAGE = 512


class FirstTables(Tables):
    page_bytes = PAGE

    def create(self, desc: Descriptor) -> tuple[ModelCache | None, Codes]:
        """Of equal keys the last one counts; a key of another cache is refused."""
        later = [desc.keys[row + 1 :] for row in range(len(desc.keys))]
        keys = tuple(
            None if key in rest else key for key, rest in zip(desc.keys, later, strict=True)
        )
        cache, codes = super().create(replace(desc, keys=keys))
        wrong = Refusals(codes)
        if wrong:
            wrong.when(any(key in self.rows for key in keys), KEY_IN_USE)
            wrong.when(self.pages() + desc.tensors > POOL_PAGES, NO_MEMORY)
        return cache, frozenset(wrong) or FINE


def _check_both(
    world: World, key: Key, cache: ModelCache | None, layers: Layers, wrong: Refusals
) -> tuple[ModelCache, int] | None:
    """The rules that both kinds of pull share. Returns the source."""
    wrong.when(key.cluster == LOCAL, INVALID)
    wrong.when(key.cluster not in (LOCAL, PEER), UNLINKED)
    check_layers(layers, wrong)
    source = world.find(key)
    wrong.when(cache is None or source is None, MISSING)
    if cache is not None:
        select(layers.dst, cache.desc.tensors, layers.per_layer, wrong)
    if source is not None:
        # At its owner a blocks cache is one whose rows are blocks; a peer names it by model.
        wrong.when(source[0].desc.is_blocks != isinstance(key, ByModel), INVALID)
    return source


@dataclass(frozen=True)
class PullRow:
    """`pull_cache`; None is an offset that is not given."""

    key: ByName | ByPosition
    slot: int
    batch_index: int = 0
    size: int = -1
    src_offset: int | None = None
    dst_offset: int | None = None
    layers: Layers = EVERY_LAYER

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.local(self.slot)
        wrong.when(world.slot(LOCAL, self.slot).desc.host, INVALID)
        wrong.when(self.size == 0 or self.size < -1, INVALID)
        source = _check_both(world, self.key, cache, self.layers, wrong)
        if cache is None:
            return frozenset(wrong)
        src_offset, dst_offset = self.src_offset or 0, self.dst_offset or 0
        room = cache.desc.row_bytes - dst_offset
        size = room if self.size == -1 else self.size
        wrong.when(self.batch_index >= cache.desc.rows, INVALID)
        wrong.when(room <= 0 or size > room, INVALID)
        if source is None:
            return frozenset(wrong)
        origin, row = source
        wrong.when(src_offset + size > origin.desc.row_bytes, INVALID)
        tensors = select_both(self.layers, origin.desc.tensors, cache.desc.tensors, wrong)
        if wrong:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            piece = origin.row(src, row)[src_offset : src_offset + size]
            cache.write(dst, self.batch_index, piece, dst_offset)
        if self.src_offset is None and self.dst_offset is None:
            world.tables[PEER].pulled(origin, row, tensors[0])
        return FINE

    def perform(self, run: Any) -> None:
        offsets = {"src_cache_offset": self.src_offset, "dst_cache_offset": self.dst_offset}
        run.manager.pull_cache(
            run.key(self.key),
            run.cache(self.slot),
            self.batch_index,
            self.size,
            **{name: offset for name, offset in offsets.items() if offset is not None},
            **run.layers(self.layers),
        )


@dataclass(frozen=True)
class PullBlockPairs:
    """`pull_blocks`; the destination may have been allocated as either kind."""

    key: ByModel
    slot: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    layers: Layers = EVERY_LAYER

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.local(self.slot)
        wrong.when(world.slot(LOCAL, self.slot).desc.host, INVALID)
        wrong.when(len(self.src) == 0 or len(self.src) != len(self.dst), INVALID)
        source = _check_both(world, self.key, cache, self.layers, wrong)
        if cache is None:
            return frozenset(wrong)
        wrong.when(any(block >= cache.desc.rows for block in self.dst), INVALID)
        if source is None:
            return frozenset(wrong)
        origin, _ = source
        wrong.when(any(block >= origin.desc.rows for block in self.src), INVALID)
        wrong.when(origin.desc.row_bytes != cache.desc.row_bytes, INVALID)
        tensors = select_both(self.layers, origin.desc.tensors, cache.desc.tensors, wrong)
        if wrong:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            for block, place in zip(self.src, self.dst, strict=True):
                cache.write(dst, place, origin.row(src, block))
        return FINE

    def perform(self, run: Any) -> None:
        run.manager.pull_blocks(
            run.key(self.key),
            run.cache(self.slot),
            list(self.src),
            list(self.dst),
            **run.layers(self.layers),
        )


@dataclass(frozen=True)
class Deallocate:
    """Of a cache that was allocated; twice is no error."""

    side: int
    slot: int

    def predict(self, world: World) -> Codes:
        made = world.slot(self.side, self.slot)
        if made.desc.allocated and made.cache is not None:
            world.tables[self.side].deallocate(made.id)
        return FINE

    def perform(self, run: Any) -> None:
        made = run.world.slot(self.side, self.slot)
        if made.desc.allocated and made.cache is not None:
            run.sides[self.side].deallocate(made.id)


@dataclass(frozen=True)
class RemoveKey:
    """By the PROMPT."""

    name: RowName

    def predict(self, world: World) -> Codes:
        world.tables[PEER].remove_key(self.name)
        return FINE

    def perform(self, run: Any) -> None:
        run.sides[PEER].remove_key(run.row_key(self.name, PEER))


class FirstRun(Run):
    """A program on the model and on a DECODER here with a linked PROMPT."""

    def _make_world(self, remote: bool) -> World:
        tables: dict[int, Tables] = {
            side: FirstTables(cluster.used_up_id()) for side, cluster in self.sides.items()
        }
        return World(remote, tables, rows_are_blocks=True)

    def _stand_in(self, desc: Descriptor) -> Any:
        shape = [desc.rows, desc.row_bytes]
        described = self.api.CacheDesc(desc.tensors, shape, self.api.DataType.DT_INT8)
        return self.api.KvCache(self.world.made[LOCAL][-1].id, described, [[1] * desc.tensors])
