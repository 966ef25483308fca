"""copy_cache, copy_blocks, swap_blocks, create_cpu_cache, remap_registered_memory."""

from __future__ import annotations

import pytest

from contract.cluster import Cluster
from contract.errors import refused
from contract.fixtures import MakeLocal
from contract.memory import ALIGNMENT, block_pieces, moved

POOL = '{"memory_size": 1048576, "page_shift": 12}'


class TestCopyCache:
    def copy(self, local: Cluster, dst: int, src: int, *args: int, **options: int) -> None:
        local.manager.copy_cache(local.caches[dst], local.caches[src], *args, **options)

    def test_c73_row_to_row(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL)
        src, dst = local.add_rows(seed=100), local.allocate_rows()
        before = local.dump(dst)
        self.copy(local, dst, src, 2, 3)
        assert local.dump(dst) == moved(before, local.dump(src), [(768, 512, 256)])

    def test_c73_offset_counts_on_both_sides(self, make_local: MakeLocal) -> None:
        local = make_local()
        src, dst = local.add_rows(row_bytes=200, seed=100), local.add_rows(row_bytes=300)
        before = local.dump(dst)
        self.copy(local, dst, src, 1, 2, 50, 7)
        assert local.dump(dst) == moved(before, local.dump(src), [(450, 350, 7)])

    def test_c73_minus_one_is_the_rest_of_the_source_row(self, make_local: MakeLocal) -> None:
        local = make_local()
        src, dst = local.add_rows(row_bytes=200, seed=100), local.add_rows(row_bytes=300)
        before = local.dump(dst)
        self.copy(local, dst, src, offset=50, req_id=5)
        assert local.dump(dst) == moved(before, local.dump(src), [(50, 50, 150)])

    def test_rows_of_one_cache(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_rows()
        before = local.dump(cache)
        self.copy(local, cache, cache, 1, 0)
        self.copy(local, cache, cache, 2, 2)  # onto itself
        assert local.dump(cache) == moved(before, before, [(0, 256, 256)])

    @pytest.mark.parametrize(
        "arguments",
        [(4, 0), (0, 4), (0, 0, 200), (0, 0, 0, 201), (0, 0, 199, 2), (0, 0, 2**64 - 1)],
    )
    def test_c73_what_does_not_fit(self, make_local: MakeLocal, arguments: tuple[int, ...]) -> None:
        local = make_local()
        src, dst = local.add_rows(row_bytes=200, seed=100), local.add_rows(row_bytes=200)
        before = local.dump(dst)
        with refused(local.api):
            self.copy(local, dst, src, *arguments)
        assert local.dump(dst) == before

    def test_c73_longer_source_row(self, make_local: MakeLocal) -> None:
        local = make_local()
        src, dst = local.add_rows(row_bytes=300), local.add_rows(row_bytes=200)
        with refused(local.api):
            self.copy(local, dst, src)

    def test_c73_other_refusals(self, make_local: MakeLocal) -> None:
        local = make_local()
        rows, blocks = local.add_rows(), local.add_blocks()
        for size in (0, -2):
            with refused(local.api):
                self.copy(local, rows, rows, size=size)
        for pair in ((rows, blocks), (blocks, rows)):
            with refused(local.api):
                self.copy(local, *pair)
        with refused(local.api):
            self.copy(local, rows, local.add_rows(tensors=2))
        gone = local.add_rows()
        local.unregister(gone)
        for pair in ((rows, gone), (gone, rows)):
            with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
                self.copy(local, *pair)

    def test_types(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.caches[local.add_rows()]
        for arguments in ((None, cache), (cache, None), (cache, cache, "0"), (cache, cache, None)):
            with pytest.raises(TypeError):
                local.manager.copy_cache(*arguments)
        for negative in ({"src_batch_index": -1}, {"offset": -1}, {"req_id": -1}):
            with pytest.raises(ValueError):
                local.manager.copy_cache(cache, cache, **negative)

    def test_memory_that_is_gone_ends_in_an_error(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks()
        gone = local.manager.register_blocks_cache(local._desc(1, 16, 64, False), [ALIGNMENT])
        with refused(local.api, "LLM_FAILED"):  # the kernel maps nothing as low as that
            local.manager.copy_blocks(gone, {0: [1]})
        local.manager.copy_blocks(local.caches[cache], {0: [1]})


class TestCopyBlocks:
    def test_c73_one_block_to_many_in_order(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks()
        before = local.dump(cache)
        local.manager.copy_blocks(local.caches[cache], {3: [0, 15, 7], 8: [9]})
        pieces = block_pieces([3, 3, 3, 8], [0, 15, 7, 9], 64)
        assert local.dump(cache) == moved(before, before, pieces)

    def test_later_pair_reads_what_an_earlier_one_wrote(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks(blocks=8192)
        before = local.dump(cache)
        local.manager.copy_blocks(local.caches[cache], {i: [i + 1] for i in range(5000)})
        pieces = block_pieces([0] * 5000, range(1, 5001), 64)
        assert local.dump(cache) == moved(before, before, pieces)

    def test_c73_refusals(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache, rows = local.caches[local.add_blocks()], local.caches[local.add_rows()]
        for info in ({16: [0]}, {0: [16]}, {0: [1], 2**64 - 1: [1]}):
            with refused(local.api):
                local.manager.copy_blocks(cache, info)
        with refused(local.api):
            local.manager.copy_blocks(rows, {0: [1]})
        for wrong in (None, [(0, 1)], {0: 1}, {"0": [1]}, {0: ["1"]}):
            with pytest.raises(TypeError):
                local.manager.copy_blocks(cache, wrong)
        for negative in ({-1: [0]}, {0: [-1]}):
            with pytest.raises(ValueError):
                local.manager.copy_blocks(cache, negative)


class TestSwapBlocks:
    def test_c74_to_host_and_back(self, make_local: MakeLocal) -> None:
        local = make_local()
        cache = local.add_blocks(seed=100)
        cpu, memory = local.cpu_cache()
        before, content = [tensor.read() for tensor in memory], local.dump(cache)
        local.manager.swap_blocks(local.caches[cache], cpu, {1: 2, 2: 3, 9: 0})
        swapped = [tensor.read() for tensor in memory]
        assert swapped == moved(before, content, block_pieces([1, 2, 9], [2, 3, 0], 64))
        local.manager.swap_blocks(cpu, local.caches[cache], {3: 15})
        assert local.dump(cache) == moved(content, swapped, block_pieces([3], [15], 64))

    def test_c74_allocated_caches(self, make_local: MakeLocal) -> None:
        local = make_local(pool=POOL, host_pool=POOL)
        device, host = local.allocate_blocks(seed=100), local.allocate_blocks(host=True)
        before = local.dump(host)
        local.manager.swap_blocks(local.caches[device], local.caches[host], {4: 5})
        assert local.dump(host) == moved(before, local.dump(device), block_pieces([4], [5], 64))

    def test_c74_refusals(self, make_local: MakeLocal) -> None:
        local = make_local()
        device = local.caches[local.add_blocks()]
        rows = local.caches[local.add_rows()]
        cpu, _ = local.cpu_cache()
        other_size, _ = local.cpu_cache(block_bytes=32)
        other_count, _ = local.cpu_cache(tensors=2)
        pairs = ((device, device), (cpu, cpu), (device, other_size), (device, other_count))
        for pair in (*pairs, (rows, cpu), (cpu, rows)):
            with refused(local.api):
                local.manager.swap_blocks(*pair, {0: 1})
        for info in ({16: 0}, {0: 16}):
            with refused(local.api):
                local.manager.swap_blocks(device, cpu, info)
        for wrong in (None, [(0, 1)], {0: "1"}, {0: None}):
            with pytest.raises(TypeError):
                local.manager.swap_blocks(device, cpu, wrong)
        with pytest.raises(ValueError):
            local.manager.swap_blocks(device, cpu, {0: -1})
        local.unregister(device.cache_id)
        with refused(local.api, "LLM_KV_CACHE_NOT_EXIST"):
            local.manager.swap_blocks(cpu, device, {0: 1})

    def test_c75_cpu_cache_checks(self, make_local: MakeLocal) -> None:
        local = make_local()
        api = local.api
        host = api.CacheDesc(2, [4, 8], api.DataType.DT_INT8, api.Placement.HOST)
        with refused(api):
            api.Cache.create_cpu_cache(host, [16])
        with refused(api):
            api.Cache.create_cpu_cache(local._desc(1, 4, 8, False), [16])
        with pytest.raises(TypeError):
            api.Cache.create_cpu_cache(host, (16, 32))
        at_zero = api.Cache.create_cpu_cache(local._desc(4, 16, 64, True), [0] * 4)
        with refused(api):
            local.manager.swap_blocks(local.caches[local.add_blocks()], at_zero, {0: 0})


class TestRemap:
    def test_accepted_and_without_effect(self, make_local: MakeLocal) -> None:
        local = make_local()
        info = local.api.MemInfo(local.api.Memtype.MEM_TYPE_DEVICE, 4096, 64)
        local.manager.remap_registered_memory(info)
        local.manager.remap_registered_memory([info, info])

    def test_everything_wrong_is_a_bad_parameter(self, make_local: MakeLocal) -> None:
        local = make_local()
        memory, kind = local.api.MemInfo, local.api.Memtype
        wrong = [
            None,
            [],
            ["x"],
            memory(kind.MEM_TYPE_HOST, 4096, 64),
            memory(kind.MEM_TYPE_DEVICE, 0, 64),
            [memory(kind.MEM_TYPE_DEVICE, 4096, 0)],
        ]
        for infos in wrong:
            with refused(local.api):
                local.manager.remap_registered_memory(infos)
