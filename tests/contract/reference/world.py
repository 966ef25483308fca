"""Both clusters as the model sees them, and the ways in which a call names things in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from contract.reference.tables import (
    INVALID,
    Descriptor,
    ModelCache,
    Refusals,
    RowName,
    Tables,
    make_cache,
)

LOCAL, PEER = 1, 2  # cluster ids
NOBODY = 3  # is not linked


@dataclass(frozen=True)
class ByName:
    """A `CacheKey`."""

    name: RowName
    cluster: int = PEER


@dataclass(frozen=True)
class ByPosition:
    """A `CacheKeyByIdAndIndex`: of the cache that was made `slot`-th at the peer."""

    slot: int
    row: int = 0
    cluster: int = PEER


@dataclass(frozen=True)
class ByModel:
    """A `BlocksCacheKey`."""

    model: int
    cluster: int = PEER


Key = ByName | ByPosition | ByModel


@dataclass(frozen=True)
class Layers:
    src: range | None = None
    dst: range | None = None
    per_layer: int = 2


EVERY_LAYER = Layers()


@dataclass
class Made:
    """One cache that was asked for: its id is used up even if it was refused."""

    id: int
    desc: Descriptor
    cache: ModelCache | None


@dataclass
class World:
    """`remote` is the transfer mode, enable_remote_cache_accessible."""

    remote: bool
    tables: dict[int, Tables]
    rows_are_blocks: bool = False
    """The first generation: a blocks cache is one whose rows are blocks."""
    made: dict[int, list[Made]] = field(default_factory=lambda: {LOCAL: [], PEER: []})

    def create(self, side: int, desc: Descriptor) -> frozenset[str]:
        if not desc.registered:
            self.made[side].append(Made(-1, desc, make_cache(-1, desc)))
            return frozenset()
        cache, codes = self.tables[side].create(desc)
        self.made[side].append(Made(self.tables[side].last_id, desc, cache))
        return codes

    def slot(self, side: int, slot: int) -> Made:
        return self.made[side][slot % len(self.made[side])]

    def local(self, slot: int) -> ModelCache | None:
        return self.tables[LOCAL].usable(self.slot(LOCAL, slot).id)

    def find(self, key: Key) -> tuple[ModelCache, int] | None:
        """The peer's cache and row that a pull's key names."""
        peer = self.tables[PEER]
        if isinstance(key, ByName):
            return peer.rows.get(key.name)
        if isinstance(key, ByModel):
            blocks = peer.models.get(key.model)
            return None if blocks is None else (blocks, 0)
        cache = peer.caches.get(self.slot(PEER, key.slot).id)
        return None if cache is None or key.row >= cache.desc.rows else (cache, key.row)

    def api_key(self, api: Any, key: Key) -> Any:
        if isinstance(key, ByModel):
            return api.BlocksCacheKey(key.cluster, key.model)
        if isinstance(key, ByName):
            return api_row_key(api, key.name, key.cluster)
        return api.CacheKeyByIdAndIndex(key.cluster, self.slot(PEER, key.slot).id, key.row)


def api_row_key(api: Any, name: RowName | None, cluster: int) -> Any:
    if name is None:
        return api.CacheKey(cluster, 2**64 - 1)
    if name.is_prefix:
        return api.CacheKey(cluster, 2**64 - 1, name.model, name.number)
    return api.CacheKey(cluster, name.number, name.model)


def check_layers(layers: Layers, wrong: Refusals) -> None:
    """What is wrong whatever the caches are."""
    wrong.when(layers.per_layer == 0, INVALID)
    for given in (layers.src, layers.dst):
        wrong.when(given is not None and (len(given) == 0 or given.start < 0), INVALID)


def select(layers: range | None, tensors: int, per_layer: int, wrong: Refusals) -> range:
    """The tensors of a layer range; no range means all."""
    if layers is None:
        return range(tensors)
    first, end = layers.start * per_layer, layers.stop * per_layer
    wrong.when(per_layer == 0 or tensors % per_layer != 0 or end > tensors, INVALID)
    return range(first, end)


def every_layer(tensors: int, per_layer: int) -> range:
    return range(tensors // per_layer if per_layer else 0)


def select_both(layers: Layers, src: int, dst: int, wrong: Refusals) -> tuple[range, range]:
    """The tensors that are copied: the n-th of the source goes to the n-th of the destination."""
    sources = select(layers.src, src, layers.per_layer, wrong)
    targets = select(layers.dst, dst, layers.per_layer, wrong)
    wrong.when(len(sources) != len(targets), INVALID)
    return sources, targets
