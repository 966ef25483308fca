"""LLMConfig: which option each property writes, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.errors import refused

POOL = '{"memory_size": 1024}'

WRITES = [
    ("listen_ip_info", "1.2.3.4:5", {"llm.listenIpInfo": "1.2.3.4:5"}),
    ("sync_kv_timeout", 500, {"llm.SyncKvCacheWaitTime": "500"}),
    ("sync_kv_timeout", "500", {"llm.SyncKvCacheWaitTime": "500"}),
    ("deploy_res_path", "/x", {"llm.deployResPath": "/x"}),
    ("buf_pool_cfg", POOL, {"llm.BufPoolCfg": POOL}),
    ("mem_pool_cfg", POOL, {"llm.MemPoolConfig": POOL}),
    ("host_mem_pool_cfg", POOL, {"llm.HostMemPoolConfig": POOL}),
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("link_total_time", 0, {"llm.LinkTotalTime": "0"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 132, {"llm.RdmaTrafficClass": "132"}),
    ("rdma_service_level", 4, {"llm.RdmaServiceLevel": "4"}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "", {"llm.GlobalResourceConfig": ""}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("output_max_size", 7, {"llm.OutputMaxSize": "7"}),
    ("mem_utilization", 0.5, {"llm.MemoryUtilization": "0.5"}),
    ("device_id", 3, {"ge.exec.deviceId": "3", "ge.session_device_id": "3"}),
    ("device_id", [0, 1], {"ge.exec.deviceId": "0;1", "ge.session_device_id": "0"}),
    ("ge_options", {"a.b": "c"}, {"a.b": "c"}),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRITES)
def test_c11_property_writes_exactly_its_option(
    api: Any, name: str, value: object, expected: dict[str, str]
) -> None:
    config = api.LLMConfig()
    setattr(config, name, value)
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95", **expected}
    assert getattr(config, name) == value


def test_c11_getter_defaults(api: Any) -> None:
    config = api.LLMConfig()
    assert config.generate_options() == {"llm.MemoryUtilization": "0.95"}
    assert (config.device_id, config.sync_kv_timeout, config.output_max_size) == (None,) * 3
    assert (config.listen_ip_info, config.local_comm_res, config.ge_options) == ("", "", {})
    assert (config.link_total_time, config.link_retry_count) == (0, 1)
    assert (config.enable_cache_manager, config.mem_utilization) == (False, 0.95)


def test_options_are_a_copy(api: Any) -> None:
    config = api.LLMConfig()
    config.gen_options()["llm.extra"] = "1"
    assert "llm.extra" not in config.options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sync_kv_timeout", 0),
        ("sync_kv_timeout", -1),
        ("sync_kv_timeout", "abc"),
        ("sync_kv_timeout", "0"),
        ("device_id", -1),
        ("device_id", [0, -1]),
        ("link_retry_count", 0),
        ("link_retry_count", 101),
        ("link_total_time", -1),
        ("link_total_time", 2**32),
        ("mem_utilization", 1.5),
        ("cluster_info", "no json"),
    ],
)
def test_c12_c13_c14_value_out_of_bounds(api: Any, name: str, value: object) -> None:
    with refused(api):
        setattr(api.LLMConfig(), name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("device_id", "0"),
        ("device_id", ["0"]),
        ("listen_ip_info", 5),
        ("listen_ip_info", None),
        ("sync_kv_timeout", 1.5),
        ("enable_cache_manager", 1),
        ("enable_switch_role", "1"),
        ("mem_utilization", 1),
        ("local_comm_res", None),
        ("ge_options", [("a", "b")]),
        ("ge_options", {"a": 1}),
        ("link_retry_count", "1"),
    ],
)
def test_wrong_type(api: Any, name: str, value: object) -> None:
    with pytest.raises(TypeError):
        setattr(api.LLMConfig(), name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("sync_kv_timeout", 2**31), ("rdma_traffic_class", -1), ("rdma_service_level", 2**32)],
)
def test_integer_out_of_range(api: Any, name: str, value: int) -> None:
    with pytest.raises(ValueError):
        setattr(api.LLMConfig(), name, value)


def test_c11_cluster_info_addresses_become_integers(api: Any) -> None:
    config = api.LLMConfig()
    config.cluster_info = json.dumps({"listen_ip_info": [{"ip": "127.0.0.1", "port": 5}]})
    written = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert written == {"listen_ip_info": [{"ip": 0x0100007F, "port": 5}]}


def test_c15_empty_resource_description_is_written(api: Any) -> None:
    config = api.LLMConfig()
    assert "llm.LocalCommRes" not in config.generate_options()
    config.local_comm_res = ""
    assert config.generate_options()["llm.LocalCommRes"] == ""
