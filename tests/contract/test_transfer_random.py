"""transfer_cache_async over random shapes, ranges, rows, blocks and tokens, against a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.cluster import Cluster
from contract.engines import Restriction, refused_by_vendor
from contract.examples import examples
from contract.layerwise import recorder
from contract.peer import Peer

pytestmark = refused_by_vendor(Restriction.REGISTER_FIRST)

Pair = Callable[..., tuple[Cluster, Peer]]

MISSING, UNLINKED = "LLM_KV_CACHE_NOT_EXIST", "LLM_NOT_YET_LINK"
SUCCESS, INVALID = "LLM_SUCCESS", "LLM_PARAM_INVALID"
PEER, NOBODY = 2, 3  # NOBODY is not linked


@dataclass(frozen=True)
class Wanted:
    """One config: `layers` of the source go to the destination's layers from `first` on.

    `missing`: its destination does not exist.
    """

    layers: range
    first: int
    src_row: int
    dst_row: int
    cluster: int = PEER
    missing: bool = False


@dataclass(frozen=True)
class Case:
    """`chunk_bytes` 0: whole rows, or whole blocks when `src_blocks` is given.

    The synchronizer refuses layer `refused_layer`.
    """

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
    per_layer: int = 2
    accessible: bool = True
    refused_layer: int | None = None

    @property
    def to_blocks(self) -> bool:
        return bool(self.dst_blocks)


@st.composite
def cases(draw: st.DrawFn, remote: bool) -> Case:
    """Mostly valid; indices may be one too high."""
    integers = st.integers
    src_layers, dst_layers = draw(integers(1, 4)), draw(integers(1, 5))
    src_rows, dst_rows = draw(integers(1, 5)), draw(integers(1, 6))
    kind = draw(st.sampled_from(["rows", "blocks", "chunks"]))
    src_bytes = draw(integers(1, 40))
    dst_bytes = src_bytes if kind == "blocks" else draw(integers(1, 40))
    reserved = None
    positions = dst_rows
    if remote and kind != "rows" and draw(st.booleans()):
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
        cluster = draw(st.sampled_from([PEER] * 9 + [NOBODY]))
        # With a token a missing destination has withdrawn: see test_transfer_extensions.
        missing = reserved is None and draw(integers(0, 9)) == 9
        dst_row = draw(integers(0, dst_rows - 1))
        configs.append(Wanted(range(start, stop), first, src_row, dst_row, cluster, missing))
    refused_layer = draw(st.one_of(st.none(), st.none(), integers(0, src_layers)))
    chunk_bytes = dst_bytes if kind == "chunks" else 0
    return Case(
        *(src_layers, dst_layers, src_rows, dst_rows, src_bytes, dst_bytes, chunk_bytes),
        *(src_blocks, dst_blocks, reserved, configs),
        *(draw(st.sampled_from([2, 2, 1, 3])), draw(integers(0, 9)) < 9, refused_layer),
    )


class Model:
    """The same transfer, byte by byte."""

    def __init__(self, case: Case, remote: bool, src: list[bytes], dst: list[bytes]) -> None:
        self._case = case
        self._remote = remote
        self._src = src
        self.dst = [bytearray(tensor) for tensor in dst]

    def run(self) -> list[set[str | None]]:
        """For each config the codes it may end with; None: it was never decided."""
        results: list[set[str | None]] = [{None} for _ in self._case.configs]
        for layer in range(self._case.src_layers):
            wanting = [i for i, config in enumerate(self._case.configs) if layer in config.layers]
            if wanting and layer == self._case.refused_layer:
                for index in wanting:
                    results[index] = {INVALID}
                return results
            for index in wanting:
                config = self._case.configs[index]
                codes = self._refusals(config, layer)
                if codes:
                    results[index] = set(codes)
                    return results
                pieces = self._pieces(config)
                assert pieces is not None
                self._copy(layer, config.first + layer - config.layers.start, pieces)
                if layer == config.layers.stop - 1:
                    results[index] = {SUCCESS}
        return results

    def _refusals(self, config: Wanted, layer: int) -> set[str]:
        codes = set()
        if config.cluster == NOBODY:
            codes.add(UNLINKED)
        if config.missing:
            codes.add(MISSING if self._remote else INVALID)
        if self._remote and not self._case.accessible and not config.missing:
            codes.add(INVALID)
        dst_layer = config.first + layer - config.layers.start
        if self._pieces(config) is None or dst_layer >= self._case.dst_layers:
            codes.add(INVALID)
        return codes

    def _copy(self, layer: int, dst_layer: int, pieces: list[tuple[int, int, int]]) -> None:
        count = self._case.per_layer
        for tensor in range(count):
            source = self._src[count * layer + tensor]
            target = self.dst[count * dst_layer + tensor]
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
        count = case.per_layer
        self._source = add_source(count * case.src_layers, case.src_rows, case.src_bytes, seed=1000)
        target = count * case.dst_layers, case.dst_rows, case.dst_bytes
        self._target = add_target(*target, accessible=None if case.accessible else False)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *unused: object) -> None:
        self._local.forget(self._source)
        self._peer.forget(self._target)

    def dumps(self) -> tuple[list[bytes], list[bytes]]:
        return self._local.dump(self._source), self._peer.dump(self._target)

    def _config(self, wanted: Wanted, token: int | None) -> Any:
        api, case = self._local.api, self._case
        stop = wanted.first + len(wanted.layers)
        if self._remote:
            key = (
                api.BlocksCacheKey(wanted.cluster, 9 if wanted.missing else 0)
                if case.to_blocks
                else api.CacheKeyByIdAndIndex(
                    wanted.cluster, 2**40 if wanted.missing else self._target, wanted.dst_row
                )
            )
            layers = range(wanted.first, stop)
            return api.TransferWithCacheKeyConfig(
                key, wanted.layers, layers, wanted.src_row, token=token
            )
        offset = 0 if case.to_blocks else wanted.dst_row * case.dst_bytes
        addrs = [addr + offset for addr in self._peer.addrs(self._target)]
        addrs += [1] * 15  # layers beyond the last
        count = case.per_layer
        chosen = addrs[count * wanted.first : count * stop]
        return api.TransferConfig(
            wanted.cluster,
            [1] * len(chosen) if wanted.missing else chosen,
            wanted.layers,
            wanted.src_row,
        )

    def transfer(self) -> list[str | None]:
        case = self._case
        token = (
            None
            if case.reserved is None
            else self._peer.open_reservation(self._target, case.reserved)
        )
        task = self._local.transfer(
            recorder(self._local.api, lambda layer: layer != case.refused_layer),
            self._source,
            [self._config(wanted, token) for wanted in case.configs],
            case.src_blocks,
            case.dst_blocks,
            case.chunk_bytes or None,
            tensor_num_per_layer=case.per_layer,
        )
        results = [None if status is None else status.name for status in task.get_results()]
        if token is not None:
            self._peer.close_reservation(token)
        return results


def test_any_transfer_does_what_the_model_does(pair: Pair, remote: bool) -> None:
    local, peer = pair()

    @examples(500)
    @given(case=cases(remote))
    def compare(case: Case) -> None:
        with Run(local, peer, remote, case) as run:
            model = Model(case, remote, *run.dumps())
            wanted, results = model.run(), run.transfer()
            for got, codes in zip(results, wanted, strict=True):
                assert got in codes, f"{results}, the model says {wanted}"
            assert run.dumps()[1] == [bytes(tensor) for tensor in model.dst]

    compare()
