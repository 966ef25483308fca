"""One random program on the model and on two linked engines, compared call by call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from contract.cluster import Cluster
from contract.memory import Tensor
from contract.peer import Peer
from contract.reference.lifetimes import Create
from contract.reference.tables import UNREGISTERED, Codes, Descriptor, RowName, Tables
from contract.reference.world import LOCAL, PEER, Key, Layers, World, api_row_key

SUCCESS = "success"


class Call(Protocol):
    def predict(self, world: World) -> Codes:
        """The codes it may be refused with; none: it succeeds, and the world has changed."""

    def perform(self, run: Any) -> None: ...


@dataclass(frozen=True)
class Program:
    caches: tuple[tuple[int, Descriptor], ...]  # side, what is made first
    calls: tuple[Call, ...]


class Run:
    """The engines' side. At the end everything that it made is gone from both clusters."""

    def __init__(self, local: Cluster, peer: Peer, remote: bool) -> None:
        self.sides: dict[int, Any] = {LOCAL: local, PEER: peer}
        self.api = local.api
        self.manager = local.manager
        self.world = self._make_world(remote)
        self._caches: list[Any] = []  # the local ones, in the order they were made
        self._unregistered: dict[int, list[Tensor]] = {}
        self._tokens: list[int] = []

    def _make_world(self, remote: bool) -> World:
        tables = {side: Tables(cluster.used_up_id()) for side, cluster in self.sides.items()}
        return World(remote, tables)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *unused: object) -> None:
        for token in self._tokens:
            self.sides[PEER].close_reservation(token)
        for side, cluster in self.sides.items():
            made = [made.id for made in self.world.made[side] if made.id != UNREGISTERED]
            names = {name for made in self.world.made[side] for name in made.desc.keys if name}
            cluster.discard_caches(made, [self.row_key(name, side) for name in names])

    # What a call needs to name things.

    def key(self, key: Key) -> Any:
        return self.world.api_key(self.api, key)

    def row_key(self, name: RowName | None, cluster: int) -> Any:
        return api_row_key(self.api, name, cluster)

    def cache(self, slot: int) -> Any:
        return self._caches[slot % len(self._caches)]

    def token(self, token: int | None) -> int | None:
        return (
            None if token is None or not self._tokens else self._tokens[token % len(self._tokens)]
        )

    @staticmethod
    def layers(layers: Layers) -> dict[str, Any]:
        return {
            "src_layer_range": layers.src,
            "dst_layer_range": layers.dst,
            "tensor_num_per_layer": layers.per_layer,
        }

    # Calls that make something.

    def create(self, side: int, desc: Descriptor) -> None:
        if side == LOCAL:
            self._caches.append(self._stand_in(desc))  # a refused cache may be named, too
        shape = desc.tensors, desc.rows, desc.row_bytes
        options: dict[str, Any] = {"seed": desc.seed, "host": desc.host}
        if not desc.registered:
            self._add_unregistered(desc)
            return
        if not desc.allocated:
            options["accessible"] = desc.accessible
        if desc.is_blocks:
            options["model_id"] = desc.model
        else:
            options["keys"] = [self.row_key(name, side) for name in desc.keys]
        verb, noun = "allocate" if desc.allocated else "add", "blocks" if desc.is_blocks else "rows"
        cache_id = getattr(self.sides[side], f"{verb}_{noun}")(*shape, **options)
        assert cache_id == self.world.made[side][-1].id, "ids count every cache, also refused ones"
        if side == LOCAL:
            self._caches[-1] = self.sides[LOCAL].caches[cache_id]

    def _stand_in(self, desc: Descriptor) -> Any:
        shape = [desc.rows, desc.row_bytes]
        placement = self.api.Placement.HOST if desc.host else self.api.Placement.DEVICE
        described = self.api.CacheDesc(desc.tensors, shape, self.api.DataType.DT_INT8, placement)
        cache_id = self.world.made[LOCAL][-1].id
        return self.api.Cache(cache_id, described, [1] * desc.tensors, desc.is_blocks)

    def _add_unregistered(self, desc: Descriptor) -> None:
        cache, memory = self.sides[LOCAL].cpu_cache(
            desc.tensors, desc.rows, desc.row_bytes, seed=desc.seed
        )
        self._caches[-1] = cache
        self._unregistered[len(self._caches) - 1] = memory

    def reserve(self, slot: int, blocks: list[int]) -> None:
        made = self.world.slot(PEER, slot)
        self._tokens.append(self.sides[PEER].reserve(made.id, blocks))

    # What it left.

    def unregistered(self) -> dict[int, list[bytes]]:
        return {
            slot: [tensor.read() for tensor in memory]
            for slot, memory in self._unregistered.items()
        }


def outcome(run: Run, call: Call) -> str:
    try:
        call.perform(run)
    except run.api.LLMException as error:
        return str(error.status_code.name)
    except TypeError:
        return "TypeError"
    return SUCCESS


def compare_call(run: Run, call: Call) -> None:
    codes = call.predict(run.world)
    got = outcome(run, call)
    assert got in (codes or {SUCCESS}), f"{call}: {got}, the model says {sorted(codes) or SUCCESS}"


def compare_contents(run: Run) -> None:
    for side in (LOCAL, PEER):
        tables = run.world.tables[side]
        caches = [[bytes(t) for t in cache.memory] for cache in tables.caches.values()]
        held, pool_used = run.sides[side].contents(list(tables.caches))
        assert held == caches, f"the caches of cluster {side} are not those of the model"
        assert pool_used == tables.pages() * tables.page_bytes, (
            "the pool holds more or less than the model"
        )
    for slot, memory in run.unregistered().items():
        cache = run.world.made[LOCAL][slot].cache
        assert cache is not None
        wanted = [bytes(tensor) for tensor in cache.memory]
        assert memory == wanted, "unregistered memory is not that of the model"


def creations(caches: Sequence[tuple[int, Descriptor]]) -> list[Call]:
    return [Create(side, desc) for side, desc in caches]


def compare(run: Run, program: Program) -> None:
    for call in [*creations(program.caches), *program.calls]:
        compare_call(run, call)
    compare_contents(run)
