"""Random programs. Most calls are careful, so that they succeed; the others may break any rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import strategies as st

from contract.reference.lifetimes import Create, Discard, EndReservation, RemoveKey, Reserve
from contract.reference.local_calls import CopyBlocks, CopyCache, SwapBlocks
from contract.reference.pulls import PullBlocks, PullCache
from contract.reference.pushes import PushBlocks, PushCache
from contract.reference.run import Call, Program
from contract.reference.tables import Descriptor, RowName
from contract.reference.world import (
    LOCAL,
    NOBODY,
    PEER,
    ByModel,
    ByName,
    ByPosition,
    Key,
    Layers,
)

Draw = st.DrawFn
NAMES = st.builds(RowName, st.booleans(), st.integers(0, 3), st.integers(0, 1))
KEYS = st.lists(st.one_of(st.none(), NAMES), max_size=4).map(tuple)


class Writer:
    """Draws one program. `row_bytes` are few, so that caches fit each other."""

    def __init__(self, draw: Draw, remote: bool) -> None:
        self._draw = draw
        self._remote = remote
        self._sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=2))
        self._tensors = draw(st.sampled_from([2, 4, 4, 1, 3]))
        self.caches: dict[int, list[Descriptor]] = {LOCAL: [], PEER: []}
        self._careful = True
        self._reserved: list[tuple[Descriptor, int]] = []
        self._named: list[ByName] = []

    def one_in(self, chances: int) -> bool:
        return self._draw(st.integers(1, chances)) == chances  # shrinks to False

    def wild(self) -> bool:
        """Whether the next value may be a wrong one."""
        return not self._careful and self.one_in(3)

    def begin_call(self) -> None:
        self._careful = not self.one_in(3)

    # Caches.

    def descriptor(self, side: int, is_blocks: bool | None = None) -> Descriptor:
        draw = self._draw
        blocks = draw(st.booleans()) if is_blocks is None else is_blocks
        host = self.one_in(6)
        unregistered = side == LOCAL and host and blocks and self.one_in(2)
        desc = Descriptor(
            draw(st.integers(1, 4)) if self.one_in(8) else self._tensors,
            draw(st.integers(1, 5)),
            0 if self.one_in(60) and not unregistered else draw(st.sampled_from(self._sizes)),
            blocks,
            host,
            draw(st.sampled_from([None, None, None, True, False])),
            not host and self.one_in(2),
            not unregistered,
            () if blocks else draw(KEYS),
            draw(st.integers(0, 1)),
            10 * (1 + len(self.caches[side])) + 1000 * side,
        )
        self.caches[side].append(desc)
        return desc

    def slot(self, side: int, fits: Callable[[Descriptor], bool]) -> int:
        slots = range(len(self.caches[side]))
        good = [slot for slot in slots if fits(self.caches[side][slot])]
        return self._draw(st.sampled_from(good if good and not self.wild() else list(slots)))

    def index(self, count: int) -> int:
        return self._draw(st.integers(0, count + 1 if self.wild() else max(count - 1, 0)))

    def cluster(self) -> int:
        return self._draw(st.sampled_from([LOCAL, NOBODY, PEER])) if self.wild() else PEER

    def layers(self, src: Descriptor, dst: Descriptor) -> Layers:
        draw = self._draw
        per_layer = draw(st.integers(0, 3)) if self.wild() else draw(st.sampled_from([1, 2]))
        if self.wild():
            ends = st.tuples(st.integers(0, 4), st.integers(0, 4))
            ranges = st.one_of(st.none(), ends.map(lambda pair: range(*pair)))
            return Layers(draw(ranges), draw(ranges), per_layer)
        if self.one_in(2) or per_layer == 0 or src.tensors % per_layer or dst.tensors % per_layer:
            return Layers(per_layer=1 if src.tensors % 2 else 2)
        most = min(src.tensors, dst.tensors) // per_layer
        if most == 0:
            return Layers(per_layer=per_layer)
        count = draw(st.integers(1, most))
        first = draw(st.integers(0, src.tensors // per_layer - count))
        other = draw(st.integers(0, dst.tensors // per_layer - count))
        return Layers(range(first, first + count), range(other, other + count), per_layer)

    def blocks(self, count: int, bound: int, *, unique: bool = False) -> tuple[int, ...]:
        high = bound if self.wild() else bound - 1
        size = 0 if self.wild() else count
        high = max(high, 0)
        most = min(size, high + 1) if unique else size
        index = st.integers(0, high)
        return tuple(self._draw(st.lists(index, min_size=most, max_size=most, unique=unique)))

    def mirror(self, desc: Descriptor) -> Descriptor:
        """The same blocks cache in the other placement, for `swap_blocks`."""
        host = not desc.host
        other = replace(
            desc, host=host, allocated=False, registered=not host or desc.row_bytes == 0
        )
        other = replace(other, rows=self._draw(st.integers(1, 5)), seed=desc.seed + 500)
        self.caches[LOCAL].append(other)
        return other

    # Calls between clusters.

    def row_key(self, slot: int) -> ByName | ByPosition:
        """Names a row of the peer's cache `slot`, if it can."""
        desc = self.caches[PEER][slot]
        names = [name for name in desc.keys if name is not None]
        if self._named and self.one_in(3):
            return self._draw(st.sampled_from(self._named))  # a pull may have used it up
        if names and (not self._remote or self.wild()) and not self.one_in(3):
            self._named.append(ByName(self._draw(st.sampled_from(names)), self.cluster()))
            return self._named[-1]
        if self.wild():
            return ByName(self._draw(NAMES), self.cluster())
        return ByPosition(slot, self.index(desc.rows), self.cluster())

    def pull_cache(self) -> Call:
        source = self.slot(PEER, lambda desc: not desc.is_blocks)
        desc = self.caches[PEER][source]
        target = self.slot(LOCAL, lambda other: not other.is_blocks and other.registered)
        local = self.caches[LOCAL][target]
        room = min(desc.row_bytes, local.row_bytes)
        sizes = st.integers(-2, room + 2) if self.wild() else st.integers(1, max(room, 1))
        size = -1 if desc.row_bytes >= local.row_bytes and self.one_in(2) else self._draw(sizes)
        key = self.row_key(source)
        return PullCache(key, target, self.index(local.rows), size, self.layers(desc, local))

    def pull_blocks(self) -> Call:
        target = self.slot(LOCAL, lambda other: other.is_blocks and other.registered)
        local = self.caches[LOCAL][target]
        if self.one_in(3):
            source = self.slot(PEER, lambda desc: not desc.is_blocks)
            desc = self.caches[PEER][source]
            chunks = -(-desc.row_bytes // max(local.row_bytes, 1)) + self.wild()
            dst = self.blocks(self._draw(st.integers(1, max(chunks, 1))), local.rows)
            src = self.blocks(len(dst), desc.rows) if self.wild() else ()
            return PullBlocks(self.row_key(source), target, src, dst, self.layers(desc, local))
        source = self.slot(PEER, lambda d: d.is_blocks and d.row_bytes == local.row_bytes)
        desc = self.caches[PEER][source]
        count = self._draw(st.integers(1, 6))
        src, dst = self.blocks(count, desc.rows), self.blocks(count, local.rows)
        key: Key = ByModel(desc.model, self.cluster())
        return PullBlocks(key, target, src, dst, self.layers(desc, local))

    def push_cache(self) -> Call:
        source = self.slot(LOCAL, lambda desc: not desc.is_blocks and desc.registered)
        desc = self.caches[LOCAL][source]
        target = self.slot(PEER, lambda d: not d.is_blocks and d.row_bytes >= desc.row_bytes)
        remote = self.caches[PEER][target]
        key = ByPosition(target, self.index(remote.rows), self.cluster())
        size = 1 if self.wild() else -1
        return PushCache(key, source, self.index(desc.rows), size, self.layers(desc, remote))

    def push_blocks(self) -> Call:
        source = self.slot(LOCAL, lambda desc: desc.is_blocks and desc.registered)
        desc = self.caches[LOCAL][source]
        token = self._draw(st.integers(0, len(self._reserved) - 1)) if self._reserved else None
        if token is not None and self.one_in(4):
            token = None
        target = self.slot(PEER, lambda d: d.is_blocks and d.row_bytes == desc.row_bytes)
        remote, positions = self.caches[PEER][target], self.caches[PEER][target].rows
        if token is not None:
            remote, positions = self._reserved[token]
        count = self._draw(st.integers(1, 6))
        # What a position that comes twice does is not specified.
        dst = self.blocks(count, positions, unique=token is not None)
        src = self.blocks(len(dst), desc.rows)
        key = ByModel(remote.model, self.cluster())
        return PushBlocks(key, source, src, dst, self.layers(desc, remote), token)

    # Calls inside one cluster.

    def copy_cache(self) -> Call:
        src = self.slot(LOCAL, lambda desc: not desc.is_blocks)
        source = self.caches[LOCAL][src]
        dst = self.slot(LOCAL, lambda d: not d.is_blocks and d.tensors == source.tensors)
        target = self.caches[LOCAL][dst]
        room = min(source.row_bytes, target.row_bytes)
        offset = self._draw(st.integers(0, room + 1 if self.wild() else max(room - 1, 0)))
        high = room - offset + (2 if self.wild() else 0)
        size = -2 if self.wild() else self._draw(st.integers(1, max(high, 1)))
        if source.row_bytes <= target.row_bytes and self.one_in(2):
            size = -1
        return CopyCache(dst, src, self.index(target.rows), self.index(source.rows), offset, size)

    def copy_blocks(self) -> Call:
        slot = self.slot(LOCAL, lambda desc: desc.is_blocks)
        rows = self.caches[LOCAL][slot].rows
        sources = self.blocks(self._draw(st.integers(0, 3)), rows)
        pairs = [(s, self.blocks(self._draw(st.integers(0, 3)), rows)) for s in sources]
        return CopyBlocks(slot, tuple(pairs))

    def swap_blocks(self) -> Call:
        def fit(one: Descriptor, other: Descriptor) -> bool:
            same = (one.tensors, one.row_bytes) == (other.tensors, other.row_bytes)
            return same and one.is_blocks and other.is_blocks and one.host != other.host

        caches = self.caches[LOCAL]
        src = self.slot(LOCAL, lambda desc: any(fit(desc, other) for other in caches))
        source = caches[src]
        dst = self.slot(LOCAL, lambda desc: fit(source, desc))
        count = self._draw(st.integers(0, 4))
        sources = self.blocks(count, source.rows)
        targets = self.blocks(len(sources), caches[dst].rows)
        return SwapBlocks(src, dst, tuple(zip(sources, targets, strict=False)))

    # What comes and goes.

    def create(self) -> Call:
        side = self._draw(st.sampled_from([LOCAL, PEER]))
        return Create(side, self.descriptor(side))

    def discard(self) -> Call:
        side = self._draw(st.sampled_from([LOCAL, PEER]))
        return Discard(side, self.slot(side, lambda desc: True), self._draw(st.booleans()))

    def remove_key(self) -> Call:
        side = self._draw(st.sampled_from([LOCAL, PEER]))
        names = [name for desc in self.caches[side] for name in desc.keys if name is not None]
        name = self._draw(st.sampled_from(names) if names and not self.wild() else NAMES)
        return RemoveKey(side, name)

    def reserve(self) -> Call:
        slot = self.slot(PEER, lambda desc: desc.is_blocks)
        desc = self.caches[PEER][slot]
        count = self._draw(st.integers(1, 5))
        blocks = self.blocks(count, desc.rows, unique=True)
        if desc.is_blocks and blocks and max(blocks) < desc.rows:
            self._reserved.append((desc, len(blocks)))
        return Reserve(slot, blocks)

    def end_reservation(self) -> Call:
        return EndReservation(self._draw(st.integers(0, 3)))


def write_program(
    draw: Draw, writer: Writer, kinds: tuple[str, ...], most_calls: int = 5
) -> Program:
    """Some caches on both sides, then some calls: `kinds` names the writer's methods for them."""
    caches = []
    for side in (LOCAL, PEER):
        for number in range(draw(st.integers(2, 3))):
            is_blocks = (number == 1) if number < 2 else None
            caches.append((side, writer.descriptor(side, is_blocks)))
    if "swap_blocks" in kinds:
        caches.append((LOCAL, writer.mirror(writer.caches[LOCAL][1])))
    calls = []
    for _ in range(draw(st.integers(1, most_calls))):
        writer.begin_call()
        calls.append(getattr(writer, draw(st.sampled_from(kinds)))())
    return Program(tuple(caches), tuple(calls))


@st.composite
def programs(draw: Draw, remote: bool, kinds: tuple[str, ...], most_calls: int = 5) -> Program:
    """A name of `kinds` may come more than once."""
    return write_program(draw, Writer(draw, remote), kinds, most_calls)
