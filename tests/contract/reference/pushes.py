"""`push_cache` and `push_blocks`, with and without a reservation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.reference.tables import (
    INVALID,
    MISSING,
    UNLINKED,
    Codes,
    ModelCache,
    Refusals,
    Reservation,
)
from contract.reference.world import (
    EVERY_LAYER,
    LOCAL,
    PEER,
    ByModel,
    ByPosition,
    Layers,
    World,
    check_layers,
    every_layer,
    select,
    select_both,
)


def _check_both(
    world: World,
    key: ByPosition | ByModel,
    slot: int,
    target: ModelCache | None,
    layers: Layers,
    wrong: Refusals,
) -> tuple[range, range]:
    """The rules that both kinds of push share. Returns the tensors of both sides."""
    cache, desc = world.local(slot), world.slot(LOCAL, slot).desc
    wrong.when(not world.remote, INVALID)
    wrong.when(key.cluster == LOCAL, INVALID)
    wrong.when(key.cluster not in (LOCAL, PEER), UNLINKED)
    wrong.when(cache is None or target is None, MISSING)
    wrong.when(not desc.is_accessible, INVALID)
    check_layers(layers, wrong)
    wrong.when(layers.per_layer > 0 and desc.tensors % layers.per_layer != 0, INVALID)
    every = every_layer(desc.tensors, layers.per_layer)
    both = Layers(
        every if layers.src is None else layers.src,
        every if layers.dst is None else layers.dst,
        layers.per_layer,
    )
    wrong.when(len(both.src or ()) != len(both.dst or ()), INVALID)
    select(both.src, desc.tensors, layers.per_layer, wrong)
    if target is None:
        return range(0), range(0)
    wrong.when(not target.desc.is_accessible, INVALID)
    return select_both(both, desc.tensors, target.desc.tensors, wrong)


@dataclass(frozen=True)
class PushCache:
    key: ByPosition
    slot: int
    batch_index: int = 0
    size: int = -1
    layers: Layers = EVERY_LAYER

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        desc = world.slot(LOCAL, self.slot).desc
        target = world.tables[PEER].usable(world.slot(PEER, self.key.slot).id)
        wrong.when(desc.is_blocks, INVALID)
        wrong.when(self.size != -1, INVALID)
        wrong.when(self.batch_index >= desc.rows, INVALID)
        tensors = _check_both(world, self.key, self.slot, target, self.layers, wrong)
        if target is not None:
            wrong.when(target.desc.is_blocks, INVALID)
            wrong.when(self.key.row >= target.desc.rows, INVALID)
            wrong.when(desc.row_bytes > target.desc.row_bytes, INVALID)
        source = world.local(self.slot)
        if wrong or target is None or source is None:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            target.write(dst, self.key.row, source.row(src, self.batch_index))
        return frozenset()

    def perform(self, run: Any) -> None:
        run.manager.push_cache(
            run.key(self.key),
            run.cache(self.slot),
            self.batch_index,
            size=self.size,
            **run.layers(self.layers),
        )


@dataclass(frozen=True)
class PushBlocks:
    """`token` is the number of a reservation of the peer; `dst` are then positions in it."""

    key: ByModel
    slot: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    layers: Layers = EVERY_LAYER
    token: int | None = None

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        desc = world.slot(LOCAL, self.slot).desc
        target = world.tables[PEER].models.get(self.key.model)
        wrong.when(not desc.is_blocks, INVALID)
        wrong.when(len(self.src) == 0 or len(self.src) != len(self.dst), INVALID)
        wrong.when(any(block >= desc.rows for block in self.src), INVALID)
        reservation = self._reservation(world)
        blocks = self._blocks(world, target, reservation, wrong)
        tensors = _check_both(world, self.key, self.slot, target, self.layers, wrong)
        if target is not None:
            wrong.when(target.desc.row_bytes != desc.row_bytes, INVALID)
        source = world.local(self.slot)
        if wrong or target is None or source is None:
            return frozenset(wrong)
        for src, dst in zip(*tensors, strict=True):
            for origin, block in zip(self.src, blocks, strict=True):
                target.write(dst, block, source.row(src, origin))
        return frozenset()

    def _reservation(self, world: World) -> Reservation | None:
        reservations = world.tables[PEER].reservations
        if self.token is None or not reservations:
            return None
        return reservations[self.token % len(reservations)]

    def _blocks(
        self,
        world: World,
        target: ModelCache | None,
        reservation: Reservation | None,
        wrong: Refusals,
    ) -> list[int]:
        if reservation is None:
            wrong.when(target is not None and max(self.dst, default=0) >= target.desc.rows, INVALID)
            return list(self.dst)
        wrong.when(not reservation.is_open, MISSING)
        wrong.when(reservation.cache is not target, INVALID)
        wrong.when(max(self.dst, default=0) >= len(reservation.blocks), INVALID)
        return [reservation.blocks[at % len(reservation.blocks)] for at in self.dst]

    def perform(self, run: Any) -> None:
        run.manager.push_blocks(
            run.key(self.key),
            run.cache(self.slot),
            list(self.src),
            list(self.dst),
            token=run.token(self.token),
            **run.layers(self.layers),
        )
