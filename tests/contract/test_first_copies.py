"""KvCacheManager: copies inside the process, and the Tensor class."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import refused
from contract.first_cluster import FirstCluster
from contract.fixtures import MakeFirst
from contract.memory import Tensor, block_pieces, moved


class TestCopies:
    def test_c73_copy_cache_and_blocks(self, make_first: MakeFirst) -> None:
        local = make_first()
        src, dst = local.allocate_rows(seed=100), local.allocate_rows()
        before = local.dump(dst)
        local.manager.copy_cache(local.caches[dst], local.caches[src], 1, 2, 10, 20)
        assert local.dump(dst) == moved(before, local.dump(src), [(522, 266, 20)])
        blocks = local.allocate_blocks(seed=200)
        before = local.dump(blocks)
        local.manager.copy_blocks(local.caches[blocks], {3: [0, 7]})
        assert local.dump(blocks) == moved(before, before, block_pieces([3, 3], [0, 7], 64))

    def test_c73_host_cache(self, make_first: MakeFirst) -> None:
        local = make_first()
        cache = local.caches[local.allocate_rows()]
        host = cpu_cache(local, [Tensor(1024) for _ in range(4)])
        with refused(local.api):
            local.manager.copy_cache(cache, host)
        with refused(local.api):
            local.manager.copy_blocks(host, {0: [1]})

    def test_c74_swap(self, make_first: MakeFirst) -> None:
        local = make_first()
        memory = [Tensor(1024) for _ in range(4)]
        host, cache = cpu_cache(local, memory), local.allocate_blocks(seed=100)
        local.manager.swap_blocks(local.caches[cache], host, {1: 2})
        for tensor, content in zip(memory, local.dump(cache), strict=True):
            assert tensor.read()[128:192] == content[64:128]
        with refused(local.api):
            local.manager.swap_blocks(host, host, {0: 0})
        two = cpu_cache(local, memory, devices=2)
        with refused(local.api):
            local.manager.swap_blocks(local.caches[cache], two, {1: 2})

    def test_c75_cpu_cache_checks(self, api: Any) -> None:
        desc = api.CacheDesc(2, [4, 8], api.DataType.DT_INT8, api.Placement.HOST)
        assert api.KvCache.create_cpu_cache(desc, [16, 32]).per_device_tensor_addrs == [[16, 32]]
        both = [[16, 32], [48, 64]]
        assert api.KvCache.create_cpu_cache(desc, both).per_device_tensor_addrs == both
        for wrong in ([], [16], [[16, 32], 48], [[16, 32], [48]]):
            with refused(api):
                api.KvCache.create_cpu_cache(desc, wrong)
        with refused(api):
            device = api.CacheDesc(1, [4], api.DataType.DT_INT8)
            api.KvCache.create_cpu_cache(device, [16])

    def test_c75_cache_tensors(self, make_first: MakeFirst) -> None:
        numpy = pytest.importorskip("numpy")
        local = make_first()
        cache = local.allocate_rows(seed=100)
        (tensor,) = local.manager.get_cache_tensors(local.caches[cache], 2)
        array = tensor.numpy()
        assert array.tobytes() == local.dump(cache)[2]
        array[1, 3] = 77
        assert local.tensors[cache][2].byte(259) == 77
        desc = local.api.CacheDesc(1, [2, 2], local.api.DataType.DT_BF16)
        halves = local.manager.allocate_cache(desc)
        local._fill(halves, 8, 0)
        (tensor,) = local.manager.get_cache_tensors(halves)
        assert tensor.numpy().dtype == numpy.float32
        with refused(local.api):
            local.manager.get_cache_tensors(halves, 1)


def cpu_cache(local: FirstCluster, memory: list[Tensor], devices: int = 1) -> Any:
    addrs = [[tensor.addr for tensor in memory]] * devices
    return local.api.KvCache.create_cpu_cache(local._desc(4, 16, 64, True), addrs)


class TestTensor:
    def test_array_and_description(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
        tensor = api.Tensor(array)
        assert tensor.tensor_desc.dtype is api.DataType.DT_INT32
        assert tensor.tensor_desc.shape == [2, 3]
        assert api.Tensor(tensor).numpy() is array
        assert tensor.numpy(copy=True) is not array

    def test_refusals(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.zeros((2, 3), numpy.int32)
        kind = api.DataType.DT_INT32
        wrong = [
            (array, api.TensorDesc(kind, [3, 2])),
            (array, api.TensorDesc(api.DataType.DT_FLOAT, [2, 3])),
            (array.T, None),
            (numpy.zeros(2, numpy.complex64), None),
            (4096, None),
        ]
        for data, desc in wrong:
            with pytest.raises(RuntimeError):
                api.Tensor(data, desc)
        with pytest.raises(TypeError):
            api.Tensor([1, 2])

    def test_bf16_and_strings(self, api: Any) -> None:
        numpy = pytest.importorskip("numpy")
        ones = numpy.array([0x3F80, 0xC000], numpy.uint16).view(numpy.float16)
        tensor = api.Tensor(ones, api.TensorDesc(api.DataType.DT_BF16, [2]))
        assert tensor.numpy().tolist() == [1.0, -2.0]
        words = api.Tensor(numpy.array([b"a", b"bc"]))
        with pytest.raises(RuntimeError):
            words.numpy()
        assert words.numpy(copy=True).tolist() == [b"a", b"bc"]
