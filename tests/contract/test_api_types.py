"""Names, enum values, descriptors and keys."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from contract.errors import refused


class TestEnums:
    def test_c03_roles_and_places(self, api: Any) -> None:
        assert [(role.name, role.value) for role in api.LLMRole] == [
            ("PROMPT", 1),
            ("DECODER", 2),
            ("MIX", 3),
        ]
        assert (api.Placement.HOST, api.Placement.DEVICE) == (0, 1)
        assert str(api.LLMRole.MIX) == "LLMRole.MIX"
        assert str(api.Placement.HOST) == "Placement.HOST"

    def test_c03_memory_enums(self, api: Any) -> None:
        assert api.Memtype.MEM_TYPE_DEVICE.value == 0
        assert api.Memtype.MEM_TYPE_HOST.value == 1
        assert [status.value for status in api.RegisterMemStatus] == [0, 1, 2]

    def test_c03_data_types(self, api: Any) -> None:
        values = {kind.name: kind.value for kind in api.DataType}
        assert values == {
            "DT_FLOAT": 0,
            "DT_FLOAT16": 1,
            "DT_INT8": 2,
            "DT_INT32": 3,
            "DT_UINT8": 4,
            "DT_INT16": 6,
            "DT_UINT16": 7,
            "DT_UINT32": 8,
            "DT_INT64": 9,
            "DT_UINT64": 10,
            "DT_DOUBLE": 11,
            "DT_BOOL": 12,
            "DT_STRING": 13,
            "DT_BF16": 27,
        }

    def test_c03_status_codes(self, api: Any) -> None:
        code = api.LLMStatusCode
        assert code.LLM_SUCCESS == 0
        assert code.LLM_FAILED == 0xFFFFFFFF
        assert code.LLM_PARAM_INVALID == 0x5010B005 == 1343270917
        assert code.LLM_SEQ_LENOVERLIMIT == 0x5010B011
        assert code.LLM_BLOCKS_OUT_OF_MEMORY == 0x5010B013
        assert code.LLM_EXIST_LINK == 0x5010B018
        assert code.LLM_TIMEOUT == 0x5010B01A
        assert code.LLM_OUT_OF_MEMORY == 0x5010B01C
        assert code.LLM_DEVICE_MEM_ERROR == 507053
        assert code.LLM_SUSPECT_REMOTE_ERROR == 507057
        assert code.LLM_UNKNOWN_ERROR == -1
        assert str(code.LLM_TIMEOUT) == "LLMStatusCode.LLM_TIMEOUT"


class TestException:
    def test_c04_is_a_runtime_error_with_a_code(self, api: Any) -> None:
        error = api.LLMException("why", status_code=api.LLMStatusCode.LLM_TIMEOUT)
        assert isinstance(error, RuntimeError)
        assert error.status_code == api.LLMStatusCode.LLM_TIMEOUT
        assert api.LLMException("why").status_code == api.LLMStatusCode.LLM_SUCCESS

    def test_c04_code_is_read_only_and_survives_pickling(self, api: Any) -> None:
        error = api.LLMException("why", status_code=api.LLMStatusCode.LLM_TIMEOUT)
        with pytest.raises(AttributeError):
            error.status_code = api.LLMStatusCode.LLM_SUCCESS
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.args, copy.status_code) == (error.args, error.status_code)

    def test_status_object(self, api: Any) -> None:
        assert api.Status(api.LLMStatusCode.LLM_SUCCESS).is_ok()
        status = api.Status(api.LLMStatusCode.LLM_FAILED)
        assert (status.is_ok(), status.status_code) == (False, api.LLMStatusCode.LLM_FAILED)


class TestCacheDesc:
    @pytest.mark.parametrize(
        ("data_type", "size"),
        [("DT_BF16", 48), ("DT_FLOAT", 96), ("DT_INT64", 192), ("DT_BOOL", 24)],
    )
    def test_c05_size_is_of_one_tensor(self, api: Any, data_type: str, size: int) -> None:
        assert api.CacheDesc(5, [2, 3, 4], api.DataType[data_type]).size == size

    def test_c05_changed_dimension_changes_the_size(self, api: Any) -> None:
        desc = api.CacheDesc(1, (2, 3), api.DataType.DT_INT8)
        assert (desc.size, desc.batch_size) == (6, 2)
        desc.update_dim(0, 10)
        assert (desc.size, desc.batch_size, desc.shape) == (30, 2, [10, 3])

    def test_defaults(self, api: Any) -> None:
        desc = api.CacheDesc(1, [2], api.DataType.DT_INT8)
        assert desc.placement == api.Placement.DEVICE
        assert (desc.batch_dim, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, -1, None)

    @pytest.mark.parametrize("index", [-1, 2])
    def test_c06_batch_dimension_out_of_range(self, api: Any, index: int) -> None:
        with refused(api):
            api.CacheDesc(1, [2, 3], api.DataType.DT_INT8, batch_dim_index=index)

    @pytest.mark.parametrize("index", [-2, 2])
    def test_c06_sequence_dimension_out_of_range(self, api: Any, index: int) -> None:
        with refused(api):
            api.CacheDesc(1, [2, 3], api.DataType.DT_INT8, seq_len_dim_index=index)

    def test_c06_wrong_types_and_values(self, api: Any) -> None:
        int8 = api.DataType.DT_INT8
        with pytest.raises(TypeError):
            api.CacheDesc("1", [2], int8)
        with pytest.raises(ValueError):
            api.CacheDesc(-1, [2], int8)
        with pytest.raises(TypeError):
            api.CacheDesc(1, "2", int8)
        with pytest.raises(TypeError):
            api.CacheDesc(1, ["2"], int8)
        with pytest.raises(TypeError):
            api.CacheDesc(1, [2], 2)
        with pytest.raises(TypeError):
            api.CacheDesc(1, None, int8)
        with refused(api):
            _ = api.CacheDesc(1, [2, -3], int8).size


class TestCacheKey:
    def test_c07_both_cluster_names_and_positions(self, api: Any) -> None:
        keys = [
            api.CacheKey(1, 2, 3),
            api.CacheKey(prompt_cluster_id=1, req_id=2, model_id=3),
            api.CacheKey(cluster_id=1, req_id=2, model_id=3),
        ]
        for key in keys:
            assert (key.cluster_id, key.prompt_cluster_id) == (1, 1)
            assert (key.req_id, key.model_id, key.prefix_id) == (2, 3, 2**64 - 1)
        assert keys[0] == keys[1] == keys[2]
        assert api.CacheKey(1, 2).model_id == 0

    def test_c07_wrong_sets_of_parameters(self, api: Any) -> None:
        with refused(api):
            api.CacheKey(1, 2, 3, 4, 5)
        with refused(api):
            api.CacheKey(1, 2, colour=3)
        with refused(api):
            api.CacheKey(1)
        with refused(api):
            api.CacheKey(req_id=1)
        with refused(api):
            api.CacheKey(1, 2, cluster_id=1)

    def test_c07_wrong_types_and_values(self, api: Any) -> None:
        with pytest.raises(TypeError):
            api.CacheKey("1", 2)
        with pytest.raises(ValueError):
            api.CacheKey(1, -2)
        with pytest.raises(ValueError):
            api.CacheKey(2**64, 2)

    def test_c08_blocks_key(self, api: Any) -> None:
        assert api.BlocksCacheKey(1).model_id == 0
        assert api.BlocksCacheKey(prompt_cluster_id=1, model_id=2).model_id == 2
        assert api.BlocksCacheKey(cluster_id=1).prompt_cluster_id == 1
        with refused(api):
            api.BlocksCacheKey(1, 2, 3)
        with pytest.raises(TypeError):
            api.BlocksCacheKey("1")

    def test_key_by_id(self, api: Any) -> None:
        key = api.CacheKeyByIdAndIndex(1, 2)
        assert (key.cluster_id, key.cache_id, key.batch_index) == (1, 2, 0)
        with pytest.raises(ValueError):
            api.CacheKeyByIdAndIndex(1, 2, -1)
        with pytest.raises(TypeError):
            api.CacheKeyByIdAndIndex(1, None)


class TestCache:
    def test_c75_cpu_cache(self, api: Any) -> None:
        desc = api.CacheDesc(2, [4, 8], api.DataType.DT_INT8, api.Placement.HOST)
        cache = api.Cache.create_cpu_cache(desc, [16, 32])
        assert (cache.cache_id, cache.is_blocks_cache) == (-1, True)
        assert cache.tensor_addrs == [16, 32]
        assert str(cache) == (
            "Cache(cache_id = -1, device_tensor_addrs = 2, is_blocks_cache = True)"
        )

    def test_c75_cpu_cache_refusals(self, api: Any) -> None:
        host = api.CacheDesc(2, [4, 8], api.DataType.DT_INT8, api.Placement.HOST)
        with refused(api):
            api.Cache.create_cpu_cache(host, [16])
        with refused(api):
            api.Cache.create_cpu_cache(api.CacheDesc(1, [4], api.DataType.DT_INT8), [16])

    def test_memory_info(self, api: Any) -> None:
        info = api.MemInfo(api.Memtype.MEM_TYPE_HOST, 4096, 64)
        assert (info.mem_type, info.addr, info.size) == (api.Memtype.MEM_TYPE_HOST, 4096, 64)
        with pytest.raises(TypeError):
            api.MemInfo(1, 4096, 64)


class TestClusterInfo:
    def test_addresses_become_little_endian_integers(self, api: Any) -> None:
        info = api.LLMClusterInfo()
        assert info.remote_cluster_id is None
        info.append_local_ip_info("127.0.0.1", 7000)
        info.append_remote_ip_info(0x0200007F, 7001)
        assert info.local_ip_info_list == [(0x0100007F, 7000)]
        assert info.remote_ip_info_list == [(0x0200007F, 7001)]

    def test_wrong_values(self, api: Any) -> None:
        info = api.LLMClusterInfo()
        with pytest.raises(RuntimeError):
            info.append_local_ip_info("no address", 1)
        with pytest.raises(ValueError):
            info.append_local_ip_info("127.0.0.1", 65536)
        with pytest.raises(TypeError):
            info.append_remote_ip_info(None, 1)
        with pytest.raises(TypeError):
            info.remote_cluster_id = "1"
        with pytest.raises(ValueError):
            info.remote_cluster_id = -1


class TestTransferConfig:
    def test_c09_defaults_and_setters(self, api: Any) -> None:
        config = api.TransferConfig(1, [16, 32])
        assert (config.src_layer_range, config.src_batch_index) == (None, 0)
        config.src_layer_range = range(1, 3)
        config.dst_addrs = (1, 2, 3, 4)
        assert (config.src_layer_range, config.dst_addrs) == (range(1, 3), (1, 2, 3, 4))

    @pytest.mark.parametrize("layers", [range(0, 4, 2), range(3, 3), range(3, 1)])
    def test_c09_bad_ranges_at_construction_and_later(self, api: Any, layers: range) -> None:
        with refused(api):
            api.TransferConfig(1, [16], layers)
        config = api.TransferConfig(1, [16])
        with refused(api):
            config.src_layer_range = layers

    def test_c09_wrong_types_at_construction_and_later(self, api: Any) -> None:
        with pytest.raises(TypeError):
            api.TransferConfig(1, None)
        with pytest.raises(TypeError):
            api.TransferConfig(1, [16], [0, 1])
        with pytest.raises(ValueError):
            api.TransferConfig(1, [-16])
        config = api.TransferConfig(1, [16])
        with pytest.raises(TypeError):
            config.dst_cluster_id = "1"
        with pytest.raises(ValueError):
            config.src_batch_index = -1

    def test_synchronizer_is_abstract(self, api: Any) -> None:
        with pytest.raises(TypeError):
            api.LayerSynchronizer()


class TestTransferWithCacheKeyConfig:
    def test_c10_fields(self, api: Any) -> None:
        key = api.CacheKeyByIdAndIndex(3, 1)
        config = api.TransferWithCacheKeyConfig(key, range(1), range(4, 5), 2)
        assert (config.dst_cluster_id, config.src_batch_index) == (3, 2)
        assert (config.src_layer_range, config.dst_layer_range) == (range(1), range(4, 5))

    def test_c10_refusals(self, api: Any) -> None:
        key = api.BlocksCacheKey(3)
        with pytest.raises(TypeError):
            api.TransferWithCacheKeyConfig(key)
        with pytest.raises(TypeError):
            api.TransferWithCacheKeyConfig(None, range(1), range(1))
        with refused(api):
            api.TransferWithCacheKeyConfig(key, range(1), range(2))
        with refused(api):
            api.TransferWithCacheKeyConfig(key, range(1), range(1), 1)
