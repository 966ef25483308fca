"""transfer_cache_async over random shapes, ranges, rows, blocks and tokens, against a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from contract.cluster import Cluster
from contract.engines import is_vendor
from contract.fixtures import MakeLocal, MakePeer
from contract.layerwise import recorder
from contract.peer import Peer

SUCCESS, INVALID = "LLM_SUCCESS", "LLM_PARAM_INVALID"


@dataclass(frozen=True)
class Wanted:
    """One config: `layers` of the source go to the destination's layers from `first` on."""

    layers: range
    first: int
    src_row: int
    dst_row: int


@dataclass(frozen=True)
class Case:
    """`chunk_bytes` 0: whole rows, or whole blocks when `src_blocks` is given."""

    src_layers: int
    dst_layers: int
    src_rows: int
    dst_rows: int
    src_bytes: int
    dst_bytes: int
    chunk_bytes: int
    src_blocks: list[int]
    dst_blocks: list[int]
    reserved: list[int] | None
    configs: list[Wanted]

    @property
    def to_blocks(self) -> bool:
        return bool(self.dst_blocks)


@st.composite
def cases(draw: st.DrawFn, remote: bool, reservations: bool) -> Case:
    """Mostly valid; indices may be one too high."""
    integers = st.integers
    src_layers, dst_layers = draw(integers(1, 4)), draw(integers(1, 5))
    src_rows, dst_rows = draw(integers(1, 5)), draw(integers(1, 6))
    kind = draw(st.sampled_from(["rows", "blocks", "chunks"]))
    src_bytes = draw(integers(1, 40))
    dst_bytes = src_bytes if kind == "blocks" else draw(integers(1, 40))
    reserved = None
    positions = dst_rows
    if reservations and kind != "rows" and draw(st.booleans()):
        reserved = draw(st.lists(integers(0, dst_rows - 1), min_size=1, unique=True))
        positions = len(reserved)
    src_blocks: list[int] = []
    dst_blocks: list[int] = []
    if kind != "rows":
        chunks = -(-src_bytes // dst_bytes)
        size = draw(integers(1, 6 if kind == "blocks" else chunks))
        dst = integers(0, positions - draw(integers(0, 1)) if positions > 1 else 0)
        dst_blocks = draw(st.lists(dst, min_size=1, max_size=size, unique=True))
    if kind == "blocks":
        count = len(dst_blocks)
        src_blocks = draw(st.lists(integers(0, src_rows - 1), min_size=count, max_size=count))
    configs = []
    for _ in range(draw(integers(1, 3))):
        start = draw(integers(0, src_layers - 1))
        stop = draw(integers(start + 1, src_layers))
        first = draw(integers(0, max(0, dst_layers - (stop - start))))
        by_model = remote and kind != "rows"
        src_row = 0 if kind == "blocks" or by_model else draw(integers(0, src_rows))
        configs.append(Wanted(range(start, stop), first, src_row, draw(integers(0, dst_rows - 1))))
    chunk_bytes = dst_bytes if kind == "chunks" else 0
    return Case(
        *(src_layers, dst_layers, src_rows, dst_rows, src_bytes, dst_bytes, chunk_bytes),
        *(src_blocks, dst_blocks, reserved, configs),
    )


class Model:
    """The same transfer, byte by byte."""

    def __init__(self, case: Case, remote: bool, src: list[bytes], dst: list[bytes]) -> None:
        self._case = case
        self._remote = remote
        self._src = src
        self.dst = [bytearray(tensor) for tensor in dst]

    def run(self) -> list[str | None]:
        results: list[str | None] = [None] * len(self._case.configs)
        for layer in range(self._case.src_layers):
            for index, config in enumerate(self._case.configs):
                if layer not in config.layers:
                    continue
                pieces = self._pieces(config)
                dst_layer = config.first + layer - config.layers.start
                if pieces is None or dst_layer >= self._case.dst_layers:
                    results[index] = INVALID
                    return results
                self._copy(layer, dst_layer, pieces)
                if layer == config.layers.stop - 1:
                    results[index] = SUCCESS
        return results

    def _copy(self, layer: int, dst_layer: int, pieces: list[tuple[int, int, int]]) -> None:
        for tensor in range(2):
            source, target = self._src[2 * layer + tensor], self.dst[2 * dst_layer + tensor]
            for src, dst, length in pieces:
                target[dst : dst + length] = source[src : src + length]

    def _pieces(self, config: Wanted) -> list[tuple[int, int, int]] | None:
        """Source offset, destination offset, length; None when the config is refused."""
        case = self._case
        src_size, dst_size = case.src_rows * case.src_bytes, case.dst_rows * case.dst_bytes
        if case.src_blocks:
            starts = [block * case.src_bytes for block in case.src_blocks]
            lengths = [case.src_bytes] * len(starts)
        else:
            if config.src_row >= case.src_rows or case.chunk_bytes >= src_size:
                return None
            step = case.chunk_bytes or case.src_bytes
            offsets = range(0, case.src_bytes, step)[: len(case.dst_blocks) or 1]
            starts = [config.src_row * case.src_bytes + offset for offset in offsets]
            lengths = [min(step, case.src_bytes - offset) for offset in offsets]
        if case.to_blocks:
            room = case.dst_rows if case.reserved is None else len(case.reserved)
            if max(case.dst_blocks) >= room:
                return None
            blocks = [case.reserved[i] if case.reserved else i for i in case.dst_blocks]
            targets = [block * case.dst_bytes for block in blocks]
        else:
            targets = [config.dst_row * case.dst_bytes]
            room_bytes = case.dst_bytes if self._remote else dst_size - targets[0]
            if case.src_bytes > room_bytes:
                return None
        return list(zip(starts, targets, lengths, strict=True))


class Run:
    """One case on the engine."""

    def __init__(self, local: Cluster, peer: Peer, remote: bool, case: Case) -> None:
        self._local, self._peer, self._remote, self._case = local, peer, remote, case
        add_source = local.add_blocks if case.src_blocks else local.add_rows
        add_target = peer.add_blocks if case.to_blocks else peer.add_rows
        self._source = add_source(2 * case.src_layers, case.src_rows, case.src_bytes, seed=1000)
        self._target = add_target(2 * case.dst_layers, case.dst_rows, case.dst_bytes)
        if is_vendor(local.api):
            assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *unused: object) -> None:
        if is_vendor(self._local.api):  # more memory is registered without a link
            assert self._local.unlink(2).name == "LLM_SUCCESS"
        self._local.forget(self._source)
        self._peer.forget(self._target)

    def dumps(self) -> tuple[list[bytes], list[bytes]]:
        return self._local.dump(self._source), self._peer.dump(self._target)

    def _config(self, wanted: Wanted, token: int | None) -> Any:
        api, case = self._local.api, self._case
        stop = wanted.first + len(wanted.layers)
        if self._remote:
            key = (
                api.BlocksCacheKey(2)
                if case.to_blocks
                else api.CacheKeyByIdAndIndex(2, self._target, wanted.dst_row)
            )
            layers = range(wanted.first, stop)
            extra = {} if token is None else {"token": token}
            return api.TransferWithCacheKeyConfig(
                key, wanted.layers, layers, wanted.src_row, **extra
            )
        offset = 0 if case.to_blocks else wanted.dst_row * case.dst_bytes
        addrs = [addr + offset for addr in self._peer.addrs(self._target)]
        addrs += [1] * 10  # layers beyond the last
        return api.TransferConfig(
            2, addrs[2 * wanted.first : 2 * stop], wanted.layers, wanted.src_row
        )

    def transfer(self) -> list[str | None]:
        case = self._case
        token = (
            None
            if case.reserved is None
            else self._peer.open_reservation(self._target, case.reserved)
        )
        task = self._local.transfer(
            recorder(self._local.api),
            self._source,
            [self._config(wanted, token) for wanted in case.configs],
            case.src_blocks,
            case.dst_blocks,
            case.chunk_bytes or None,
        )
        results = [None if status is None else status.name for status in task.get_results()]
        if token is not None:
            self._peer.close_reservation(token)
        return results


def test_any_transfer_does_what_the_model_does(
    make_local: MakeLocal, make_peer: MakePeer, remote: bool
) -> None:
    local, peer = make_local(1, remote=remote), make_peer(2, remote=remote)
    vendor = is_vendor(local.api)
    if not vendor:
        assert local.link(2, peer.listen_port).name == "LLM_SUCCESS"

    @settings(max_examples=500)
    @given(case=cases(remote, reservations=remote and not vendor))
    def compare(case: Case) -> None:
        with Run(local, peer, remote, case) as run:
            model = Model(case, remote, *run.dumps())
            assert run.transfer() == model.run()
            assert run.dumps()[1] == [bytes(tensor) for tensor in model.dst]

    compare()
