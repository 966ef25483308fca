"""What one cluster holds: caches, their bytes, and the keys bound to them. Slow and obvious.

Written from the description of the API alone, so that an error of the engine is not repeated here.
Every method that may be refused returns the status codes with which it may be; none means that it
has to succeed, and then has happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from contract.memory import pattern

INVALID = "LLM_PARAM_INVALID"
MISSING = "LLM_KV_CACHE_NOT_EXIST"
UNLINKED = "LLM_NOT_YET_LINK"
NO_MEMORY = "LLM_OUT_OF_MEMORY"
DISABLED = "LLM_FEATURE_NOT_ENABLED"

PAGE = 4096
POOL_PAGES = 16
UNREGISTERED = -1

Codes = frozenset[str]
FINE: Codes = frozenset()


class Refusals(set[str]):
    """The codes of all rules that a call breaks; which of them is reported is not modelled."""

    def when(self, broken: bool, code: str) -> None:
        if broken:
            self.add(code)


@dataclass(frozen=True)
class RowName:
    """A `CacheKey`: of a request, or of a prefix. Two kinds, two name spaces."""

    is_prefix: bool
    number: int
    model: int


@dataclass(frozen=True)
class Descriptor:
    """A cache to be made. `keys` of a contiguous one name its first rows, None skips a row."""

    tensors: int
    rows: int
    row_bytes: int
    is_blocks: bool = False
    host: bool = False
    accessible: bool | None = None
    allocated: bool = False
    registered: bool = True
    keys: tuple[RowName | None, ...] = ()
    model: int | None = 0
    seed: int = 0

    @property
    def is_accessible(self) -> bool:
        if self.allocated:
            return True
        return not self.host if self.accessible is None else self.accessible


@dataclass
class ModelCache:
    id: int
    desc: Descriptor
    memory: list[bytearray]
    has_id: bool = True
    # Of an allocated cache: the keys that keep it, and the tensors of their rows already pulled.
    keys: dict[int, RowName] = field(default_factory=dict)
    pulled: dict[int, set[int]] = field(default_factory=dict)

    def row(self, tensor: int, row: int) -> bytes:
        size = self.desc.row_bytes
        return bytes(self.memory[tensor][row * size : (row + 1) * size])

    def write(self, tensor: int, row: int, data: bytes, offset: int = 0) -> None:
        start = row * self.desc.row_bytes + offset
        self.memory[tensor][start : start + len(data)] = data


@dataclass
class Reservation:
    cache: ModelCache
    blocks: list[int]
    is_open: bool = True


def make_cache(cache_id: int, desc: Descriptor) -> ModelCache:
    size = desc.rows * desc.row_bytes
    memory = [bytearray(pattern(desc.seed + i, size)) for i in range(desc.tensors)]
    return ModelCache(cache_id, desc, memory)


class Tables:
    page_bytes = PAGE
    """What a tensor of the pool takes up; the model's tensors are shorter."""

    def __init__(self, last_id: int = 0) -> None:
        self.last_id = last_id
        self.caches: dict[int, ModelCache] = {}
        self.rows: dict[RowName, tuple[ModelCache, int]] = {}
        self.models: dict[int, ModelCache] = {}
        self.reservations: list[Reservation] = []

    # Caches.

    def create(self, desc: Descriptor) -> tuple[ModelCache | None, Codes]:
        """An engine's refusal uses an id up."""
        self.last_id += 1
        wrong = Refusals()
        named = [key for key in desc.keys if key is not None]
        wrong.when(desc.row_bytes == 0, INVALID)
        wrong.when(len(desc.keys) > desc.rows, INVALID)
        if desc.allocated:
            wrong.when(any(key in self.rows for key in named), INVALID)
            wrong.when(len(set(named)) < len(named), INVALID)
            wrong.when(self.pages() + desc.tensors > POOL_PAGES, NO_MEMORY)
        if wrong:
            return None, frozenset(wrong)
        cache = make_cache(self.last_id, desc)
        self.caches[cache.id] = cache
        if desc.is_blocks and desc.model is not None:
            self.models[desc.model] = cache
        for row, key in enumerate(desc.keys):
            if key is not None:
                self.rows.setdefault(key, (cache, row))
                if desc.allocated:
                    cache.keys[row] = key
        return cache, FINE

    def pages(self) -> int:
        return sum(cache.desc.tensors for cache in self.caches.values() if cache.desc.allocated)

    def unregister(self, cache_id: int) -> None:
        cache = self.caches.get(cache_id)
        if cache is not None and not cache.desc.allocated:
            self._erase(cache)

    def deallocate(self, cache_id: int) -> None:
        cache = self.caches.get(cache_id)
        if cache is not None and cache.desc.allocated:
            cache.has_id = False
            self._free_unless_needed(cache)

    def remove_key(self, name: RowName) -> None:
        if name not in self.rows:
            return
        cache, row = self.rows.pop(name)
        if cache.desc.allocated:
            del cache.keys[row]
            self._free_unless_needed(cache)

    def _free_unless_needed(self, cache: ModelCache) -> None:
        if not cache.has_id and not cache.keys:
            self._erase(cache)

    def _erase(self, cache: ModelCache) -> None:
        del self.caches[cache.id]
        self.rows = {name: row for name, row in self.rows.items() if row[0] is not cache}
        self.models = {model: found for model, found in self.models.items() if found is not cache}

    # Lookup.

    def usable(self, cache_id: int) -> ModelCache | None:
        """A cache as an argument of a call of its own process, or as a destination."""
        cache = self.caches.get(cache_id)
        return cache if cache is not None and cache.has_id else None

    def pulled(self, cache: ModelCache, row: int, tensors: Iterable[int]) -> None:
        """A peer has pulled from a row in message mode: a request's key is used up."""
        name = cache.keys.get(row)
        if name is None or name.is_prefix:
            return
        done = cache.pulled.setdefault(row, set())
        done.update(tensors)
        if len(done) == cache.desc.tensors:
            self.remove_key(name)
