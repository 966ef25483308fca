"""Caches that come and go, keys that are removed, and reservations, on either side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contract.reference.tables import (
    INVALID,
    MISSING,
    Codes,
    Descriptor,
    Refusals,
    Reservation,
    RowName,
)
from contract.reference.world import PEER, World


@dataclass(frozen=True)
class Create:
    """`register_cache`, `register_blocks_cache`, `allocate_cache` or `allocate_blocks_cache`."""

    side: int
    desc: Descriptor

    def predict(self, world: World) -> Codes:
        return world.create(self.side, self.desc)

    def perform(self, run: Any) -> None:
        run.create(self.side, self.desc)


@dataclass(frozen=True)
class Discard:
    """`unregister_cache` of any cache; `deallocate_…` of an allocated one. Twice is no error."""

    side: int
    slot: int
    deallocates: bool = False

    def predict(self, world: World) -> Codes:
        made = world.slot(self.side, self.slot)
        if self._deallocates(world):
            world.tables[self.side].deallocate(made.id)
        else:
            world.tables[self.side].unregister(made.id)
        return frozenset()

    def _deallocates(self, world: World) -> bool:
        made = world.slot(self.side, self.slot)
        return self.deallocates and made.desc.allocated and made.cache is not None

    def perform(self, run: Any) -> None:
        made = run.world.slot(self.side, self.slot)
        method = "deallocate" if self._deallocates(run.world) else "unregister"
        getattr(run.sides[self.side], method)(made.id)


@dataclass(frozen=True)
class RemoveKey:
    side: int
    name: RowName

    def predict(self, world: World) -> Codes:
        world.tables[self.side].remove_key(self.name)
        return frozenset()

    def perform(self, run: Any) -> None:
        run.sides[self.side].remove_key(run.row_key(self.name, self.side))


@dataclass(frozen=True)
class Reserve:
    """The peer sets blocks aside."""

    slot: int
    blocks: tuple[int, ...]

    def predict(self, world: World) -> Codes:
        wrong = Refusals()
        cache = world.tables[PEER].usable(world.slot(PEER, self.slot).id)
        if cache is None:
            return frozenset({MISSING})
        wrong.when(not cache.desc.is_blocks or not self.blocks, INVALID)
        wrong.when(any(block >= cache.desc.rows for block in self.blocks), INVALID)
        if not wrong:
            world.tables[PEER].reservations.append(Reservation(cache, list(self.blocks)))
        return frozenset(wrong)

    def perform(self, run: Any) -> None:
        run.reserve(self.slot, list(self.blocks))


@dataclass(frozen=True)
class EndReservation:
    token: int

    def predict(self, world: World) -> Codes:
        reservations = world.tables[PEER].reservations
        if reservations:
            reservations[self.token % len(reservations)].is_open = False
        return frozenset()

    def perform(self, run: Any) -> None:
        token = run.token(self.token)
        if token is not None:
            run.sides[PEER].close_reservation(token)
