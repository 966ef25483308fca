"""`pull_cache` and `pull_blocks`: what the model says, and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.reference.tables import (
    DISABLED,
    INVALID,
    MISSING,
    UNLINKED,
    Codes,
    ModelCache,
    Refusals,
)
from contract.reference.world import (
    EVERY_LAYER,
    LOCAL,
    PEER,
    ByModel,
    ByName,
    Key,
    Layers,
    World,
    check_layers,
    select,
    select_both,
)


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
        wrong.when(world.remote and not cache.desc.is_accessible, INVALID)
    if source is not None:
        desc = source[0].desc
        wrong.when(desc.is_blocks != isinstance(key, ByModel), INVALID)
        wrong.when(world.remote and not desc.is_accessible, INVALID)
        if cache is not None:
            wrong.when(not world.remote and desc.host and cache.desc.host, DISABLED)
    return source


@dataclass(frozen=True)
class PullCache:
    key: ByName | Any
    slot: int
    batch_index: int = 0
    size: int = -1
    layers: Layers = EVERY_LAYER

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.local(self.slot)
        wrong.when(world.remote and isinstance(self.key, ByName), "TypeError")
        wrong.when(world.slot(LOCAL, self.slot).desc.is_blocks, INVALID)
        wrong.when(self.size == 0 or self.size < -1, INVALID)
        source = _check_both(world, self.key, cache, self.layers, wrong)
        if cache is None:
            return frozenset(wrong)
        size = cache.desc.row_bytes if self.size == -1 else self.size
        wrong.when(self.batch_index >= cache.desc.rows or size > cache.desc.row_bytes, INVALID)
        if source is None:
            return frozenset(wrong)
        origin, row = source
        wrong.when(size > origin.desc.row_bytes, INVALID)
        tensors = select_both(self.layers, origin.desc.tensors, cache.desc.tensors, wrong)
        if wrong:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            cache.write(dst, self.batch_index, origin.row(src, row)[:size])
        if not world.remote:
            world.tables[PEER].pulled(origin, row, tensors[0])
        return frozenset()

    def perform(self, run: Any) -> None:
        run.manager.pull_cache(
            run.key(self.key),
            run.cache(self.slot),
            self.batch_index,
            self.size,
            **run.layers(self.layers),
        )


@dataclass(frozen=True)
class PullBlocks:
    """With a `ByModel` key blocks go to blocks, else a row is cut into blocks."""

    key: Key
    slot: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    layers: Layers = EVERY_LAYER

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.local(self.slot)
        by_model = isinstance(self.key, ByModel)
        wrong.when(not world.slot(LOCAL, self.slot).desc.is_blocks, INVALID)
        wrong.when(len(self.dst) == 0, INVALID)
        wrong.when(by_model != (len(self.src) > 0), INVALID)
        wrong.when(by_model and len(self.src) != len(self.dst), INVALID)
        source = _check_both(world, self.key, cache, self.layers, wrong)
        if cache is None:
            return frozenset(wrong)
        size = cache.desc.row_bytes
        wrong.when(any(block >= cache.desc.rows for block in self.dst), INVALID)
        if source is None:
            return frozenset(wrong)
        origin, row = source
        if by_model:
            wrong.when(any(block >= origin.desc.rows for block in self.src), INVALID)
            wrong.when(origin.desc.row_bytes != size, INVALID)
        else:
            wrong.when((len(self.dst) - 1) * size >= origin.desc.row_bytes, INVALID)
        tensors = select_both(self.layers, origin.desc.tensors, cache.desc.tensors, wrong)
        if wrong:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            for index, block in enumerate(self.dst):
                if by_model:
                    cache.write(dst, block, origin.row(src, self.src[index]))
                else:
                    chunk = origin.row(src, row)[index * size : (index + 1) * size]
                    cache.write(dst, block, chunk)
        if not by_model and not world.remote:
            world.tables[PEER].pulled(origin, row, tensors[0])
        return frozenset()

    def perform(self, run: Any) -> None:
        run.manager.pull_blocks(
            run.key(self.key),
            run.cache(self.slot),
            list(self.src),
            list(self.dst),
            **run.layers(self.layers),
        )
