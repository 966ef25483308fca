"""Arguments of the wrong shape or of extreme size: the documented error, or the right bytes."""

from __future__ import annotations

from typing import Any

import pytest

from contract.actions import names
from contract.engines import remote_mode
from contract.errors import refused
from contract.fixtures import MakeFirst, MakeLocal, Pair
from contract.layerwise import blocks_of, recorder
from contract.memory import ALIGNMENT, moved

MILLION = 10**6
# No dimension, a zero, a negative one, one dimension too many, and sizes beyond 64 bits.
SHAPES = [(0, 8), (4, 0), (4, -1), (-4, -8), (1,) * 32, (2**40, 2**40), (2**62, 4), (2**63 - 1,)]
POOL = '{"memory_size": 1048576, "page_shift": 12}'


def scattered(count: int, blocks: int) -> list[int]:
    """No two neighbours, so that each block is a run of its own; every block comes many times."""
    return [(index * 5) % blocks for index in range(count)]


class TestShapes:
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["allocate_cache", "allocate_blocks_cache"])
    def test_allocation(self, make_local: MakeLocal, name: str, shape: tuple[int, ...]) -> None:
        local = make_local(pool=POOL)
        desc = local.api.CacheDesc(2, shape, local.api.DataType.DT_INT64)
        with refused(local.api):
            getattr(local.manager, name)(desc)
        assert local.pool_used() == 0
        local.allocate_rows()

    @pytest.mark.parametrize("shape", SHAPES)
    def test_first_generation(self, make_first: MakeFirst, shape: tuple[int, ...]) -> None:
        local = make_first()
        desc = local.api.CacheDesc(2, shape, local.api.DataType.DT_INT64)
        for allocate in (local.manager.allocate_cache, local.manager.allocate_blocks_cache):
            with refused(local.api):
                allocate(desc)
        assert local.pool_used() == 0
        local.allocate_rows()

    def test_thirty_one_dimensions_are_allowed(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        desc = local.api.CacheDesc(1, (2,) + (1,) * 30, local.api.DataType.DT_INT8)
        local.manager.allocate_cache(desc)
        local.manager.register_cache(desc, [ALIGNMENT])

    @pytest.mark.parametrize("num_tensors", [2**32 - 1, 2**20])
    def test_more_tensors_than_there_is_memory(
        self, make_local: MakeLocal, num_tensors: int
    ) -> None:
        local = make_local(pool=POOL)
        desc = local.api.CacheDesc(num_tensors, (4, 8), local.api.DataType.DT_INT8)
        with refused(local.api, "LLM_OUT_OF_MEMORY"):
            local.manager.allocate_cache(desc)
        assert local.pool_used() == 0


class TestMillionBlocks:
    @pytest.mark.parametrize("neighbours", [True, False], ids=["one run", "scattered"])
    def test_pull(self, pair: Pair, neighbours: bool) -> None:
        local, peer = pair()
        blocks = MILLION if neighbours else 1024
        source = peer.add_blocks(tensors=2, blocks=blocks, block_bytes=8, seed=100)
        cache = local.add_blocks(tensors=2, blocks=blocks, block_bytes=8)
        indices = list(range(MILLION)) if neighbours else scattered(MILLION, blocks)
        local.pull_blocks(local.api.BlocksCacheKey(2), cache, indices, indices)
        assert local.dump(cache) == peer.dump(source)

    @remote_mode
    def test_push(self, pair: Pair) -> None:
        local, peer = pair()
        cache = local.add_blocks(tensors=2, blocks=1024, block_bytes=8, seed=100)
        target = peer.add_blocks(tensors=2, blocks=1024, block_bytes=8)
        indices = scattered(MILLION, 1024)
        local.push_blocks(local.api.BlocksCacheKey(2), cache, indices, indices)
        assert peer.dump(target) == local.dump(cache)

    def test_layers(self, pair: Pair, remote: bool) -> None:
        local, peer = pair()
        source = local.add_blocks(tensors=2, blocks=1024, seed=100)
        target = blocks_of(local.api, remote, 2, peer, tensors=2, blocks=1024)
        indices = scattered(MILLION, 1024)
        task = local.transfer(
            recorder(local.api), source, [target.config(range(1))], indices, indices
        )
        assert names(task) == ["LLM_SUCCESS"]
        assert peer.dump(target.cache_id) == local.dump(source)

    @pytest.mark.parametrize("side", ["src", "dst"])
    def test_last_one_is_outside(self, pair: Pair, remote: bool, side: str) -> None:
        local, peer = pair()
        theirs = peer.add_blocks(tensors=2, blocks=1024, block_bytes=8, seed=100)
        mine = local.add_blocks(tensors=2, blocks=1024, block_bytes=8)
        before, content = local.dump(mine), peer.dump(theirs)
        right = scattered(MILLION, 1024)
        wrong = [*right[:-1], 1024]
        src, dst = (wrong, right) if side == "src" else (right, wrong)
        with refused(local.api):
            local.pull_blocks(local.api.BlocksCacheKey(2), mine, src, dst)
        if remote:
            with refused(local.api):
                local.push_blocks(local.api.BlocksCacheKey(2), mine, src, dst)
        assert (local.dump(mine), peer.dump(theirs)) == (before, content)

    def test_row_to_a_million_blocks(self, pair: Pair) -> None:
        """The row has four chunks."""
        local, peer = pair()
        source, cache = peer.add_rows(), local.add_blocks()
        before = local.dump(cache)
        with refused(local.api):
            local.pull_blocks(
                local.api.CacheKeyByIdAndIndex(2, source), cache, [], scattered(MILLION, 16)
            )
        assert local.dump(cache) == before

    def test_inside_a_process(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks(tensors=1, blocks=1024, block_bytes=8)
        before = local.dump(cache)
        local.manager.copy_blocks(local.caches[cache], {3: list(range(4, 1024)) * 980})
        pieces = [(24, 8 * block, 8) for block in range(4, 1024)]
        assert local.dump(cache) == moved(before, before, pieces)


class TestDuplicates:
    def test_block_twice_on_both_sides(self, pair: Pair, remote: bool) -> None:
        """Of two sources for one block the last wins, on each side and in each direction."""
        local, peer = pair()
        theirs, mine = peer.add_blocks(seed=100), local.add_blocks()
        before, content = local.dump(mine), peer.dump(theirs)
        src, dst = [1, 1, 2, 3, 4, 5], [6, 7, 8, 8, 9, 6]
        pieces = [(64 * a, 64 * b, 64) for a, b in zip(src, dst, strict=True)]
        local.pull_blocks(local.api.BlocksCacheKey(2), mine, src, dst)
        after = moved(before, content, pieces)
        assert local.dump(mine) == after
        if remote:
            local.push_blocks(local.api.BlocksCacheKey(2), mine, src, dst)
            assert peer.dump(theirs) == moved(content, after, pieces)


@pytest.mark.parametrize("size", [2**63 - 1, 2**62, 257])
def test_sizes_over_the_row(pair: Pair, size: Any) -> None:
    local, peer = pair()
    source, cache = peer.add_rows(), local.add_rows()
    before = local.dump(cache)
    with refused(local.api):
        local.pull_cache(local.api.CacheKeyByIdAndIndex(2, source), cache, 0, size)
    assert local.dump(cache) == before


@pytest.mark.parametrize("offset", [1, 2**63 - 1, 256])
def test_first_generation_offset_over_the_row(linked: Any, offset: int) -> None:
    local, peer = linked
    source, cache = peer.allocate_rows(), local.allocate_rows()
    key = local.api.CacheKeyByIdAndIndex(2, source)
    before = local.dump(cache)
    for name in ("src_cache_offset", "dst_cache_offset"):
        with refused(local.api):
            local.pull_cache(key, cache, 0, 256, **{name: offset})
    assert local.dump(cache) == before
