"""``LLMConfig``: typed properties that become the option strings of ``LLMDataDist.init``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm_llmdd_connector.datadist.checks import (
    check,
    check_elements,
    check_int32,
    check_type,
    check_uint32,
)
from vllm_llmdd_connector.datadist.cluster_info import trans_str_ip
from vllm_llmdd_connector.datadist.status import fail

__all__ = ["LLMConfig", "LlmConfig"]

_MAX_LINK_RETRY = 100
_DEFAULT_MEM_UTILIZATION = "0.95"


def _flag(value: bool) -> str:
    return "1" if value else "0"


class LLMConfig:
    """Options of one process. Unset properties write no option.

    ``generate_options`` returns a new dict each time, so a caller may change it freely.
    """

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}
        self._values: dict[str, Any] = {}  # property -> value as it was set
        self._options: dict[str, str] = {}  # option key -> text

    def generate_options(self) -> dict[str, str]:
        options = {**self._ge_options, **self._options}
        options.setdefault("llm.MemoryUtilization", _DEFAULT_MEM_UTILIZATION)
        return options

    gen_options = generate_options

    @property
    def options(self) -> dict[str, str]:
        return self.generate_options()

    def _set(self, name: str, value: Any, key: str, text: str) -> None:
        self._values[name] = value
        self._options[key] = text

    def _set_text(self, name: str, value: str, key: str) -> None:
        """A string whose empty value means "not set"."""
        check_type(name, value, str)
        self._values[name] = value
        if value:
            self._options[key] = value
        else:
            self._options.pop(key, None)

    def _set_flag(self, name: str, value: bool, key: str) -> None:
        check_type(name, value, bool)
        self._set(name, value, key, _flag(value))

    @property
    def ge_options(self) -> dict[str, str]:
        """Options that are passed on as they are; properties win over them."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: Mapping[str, str]) -> None:
        check_type("ge_options", ge_options, dict)
        check_elements("ge_options", ge_options.keys(), str)
        check_elements("ge_options", ge_options.values(), str)
        self._ge_options = dict(ge_options)

    @property
    def device_id(self) -> int | list[int] | tuple[int, ...] | None:
        return self._values.get("device_id")

    @device_id.setter
    def device_id(self, device_id: int | list[int] | tuple[int, ...]) -> None:
        check_type("device_id", device_id, int, list, tuple)
        ids = [device_id] if isinstance(device_id, int) else list(device_id)
        check_elements("device_id", ids, int)
        check(len(ids) > 0, "device_id is empty")
        for number in ids:
            check_int32("device_id", number)
            check(number >= 0, f"device_id {number} is below 0")
        self._set("device_id", device_id, "ge.exec.deviceId", ";".join(map(str, ids)))
        self._options["ge.session_device_id"] = str(ids[0])

    @property
    def listen_ip_info(self) -> str:
        """``ip:port`` to listen on; port 0 picks a free one on the host engine."""
        return str(self._values.get("listen_ip_info", ""))

    @listen_ip_info.setter
    def listen_ip_info(self, listen_ip_info: str) -> None:
        self._set_text("listen_ip_info", listen_ip_info, "llm.listenIpInfo")

    @property
    def sync_kv_timeout(self) -> int | str | None:
        """Bound of each pull and push in ms (the engine's default is 1000)."""
        return self._values.get("sync_kv_timeout")

    @sync_kv_timeout.setter
    def sync_kv_timeout(self, sync_kv_timeout: int | str) -> None:
        check_type("sync_kv_timeout", sync_kv_timeout, int, str)
        text = str(int(sync_kv_timeout)) if isinstance(sync_kv_timeout, int) else sync_kv_timeout
        digits = text.isascii() and text.isdigit()
        check(digits and int(text) > 0, f"sync_kv_timeout must be above 0 ms, got {text!r}")
        check_int32("sync_kv_timeout", int(text))
        self._set("sync_kv_timeout", sync_kv_timeout, "llm.SyncKvCacheWaitTime", text)

    @property
    def deploy_res_path(self) -> str:
        return str(self._values.get("deploy_res_path", ""))

    @deploy_res_path.setter
    def deploy_res_path(self, deploy_res_path: str) -> None:
        self._set_text("deploy_res_path", deploy_res_path, "llm.deployResPath")

    @property
    def buf_pool_cfg(self) -> str:
        return str(self._values.get("buf_pool_cfg", ""))

    @buf_pool_cfg.setter
    def buf_pool_cfg(self, buf_pool_cfg: str) -> None:
        self._set_text("buf_pool_cfg", buf_pool_cfg, "llm.BufPoolCfg")

    @property
    def mem_pool_cfg(self) -> str:
        return str(self._values.get("mem_pool_cfg", ""))

    @mem_pool_cfg.setter
    def mem_pool_cfg(self, mem_pool_cfg: str) -> None:
        self._set_text("mem_pool_cfg", mem_pool_cfg, "llm.MemPoolConfig")

    @property
    def host_mem_pool_cfg(self) -> str:
        return str(self._values.get("host_mem_pool_cfg", ""))

    @host_mem_pool_cfg.setter
    def host_mem_pool_cfg(self, host_mem_pool_cfg: str) -> None:
        self._set_text("host_mem_pool_cfg", host_mem_pool_cfg, "llm.HostMemPoolConfig")

    @property
    def enable_cache_manager(self) -> bool:
        """True selects the second-generation ``CacheManager``, the one of this engine."""
        return bool(self._values.get("enable_cache_manager", False))

    @enable_cache_manager.setter
    def enable_cache_manager(self, enable_cache_manager: bool) -> None:
        self._set_flag("enable_cache_manager", enable_cache_manager, "llm.EnableCacheManager")

    @property
    def enable_remote_cache_accessible(self) -> bool:
        """Must be the same on both ends of a link; pushes need True."""
        return bool(self._values.get("enable_remote_cache_accessible", False))

    @enable_remote_cache_accessible.setter
    def enable_remote_cache_accessible(self, enable: bool) -> None:
        self._set_flag("enable_remote_cache_accessible", enable, "llm.EnableRemoteCacheAccessible")

    @property
    def link_total_time(self) -> int:
        return int(self._values.get("link_total_time", 0))

    @link_total_time.setter
    def link_total_time(self, link_total_time: int) -> None:
        check_type("link_total_time", link_total_time, int)
        check(
            0 <= link_total_time < 2**32,
            f"link_total_time {link_total_time} is outside [0, {2**32})",
        )
        self._set("link_total_time", link_total_time, "llm.LinkTotalTime", str(link_total_time))

    @property
    def link_retry_count(self) -> int:
        return int(self._values.get("link_retry_count", 1))

    @link_retry_count.setter
    def link_retry_count(self, link_retry_count: int) -> None:
        check_type("link_retry_count", link_retry_count, int)
        check(
            1 <= link_retry_count <= _MAX_LINK_RETRY,
            f"link_retry_count {link_retry_count} is outside [1, {_MAX_LINK_RETRY}]",
        )
        self._set("link_retry_count", link_retry_count, "llm.LinkRetryCount", str(link_retry_count))

    @property
    def rdma_traffic_class(self) -> int | None:
        return self._values.get("rdma_traffic_class")

    @rdma_traffic_class.setter
    def rdma_traffic_class(self, rdma_traffic_class: int) -> None:
        check_uint32("rdma_traffic_class", rdma_traffic_class)
        self._set(
            "rdma_traffic_class",
            rdma_traffic_class,
            "llm.RdmaTrafficClass",
            str(rdma_traffic_class),
        )

    @property
    def rdma_service_level(self) -> int | None:
        return self._values.get("rdma_service_level")

    @rdma_service_level.setter
    def rdma_service_level(self, rdma_service_level: int) -> None:
        check_uint32("rdma_service_level", rdma_service_level)
        self._set(
            "rdma_service_level",
            rdma_service_level,
            "llm.RdmaServiceLevel",
            str(rdma_service_level),
        )

    @property
    def local_comm_res(self) -> str:
        """Set, even to "", it turns the cache manager and remote access on by default."""
        return str(self._values.get("local_comm_res", ""))

    @local_comm_res.setter
    def local_comm_res(self, local_comm_res: str) -> None:
        check_type("local_comm_res", local_comm_res, str)
        self._set("local_comm_res", local_comm_res, "llm.LocalCommRes", local_comm_res)

    @property
    def transfer_backend(self) -> str:
        return str(self._values.get("transfer_backend", ""))

    @transfer_backend.setter
    def transfer_backend(self, transfer_backend: str) -> None:
        check_type("transfer_backend", transfer_backend, str)
        self._set("transfer_backend", transfer_backend, "llm.TransferBackend", transfer_backend)

    @property
    def global_resource_config(self) -> str:
        return str(self._values.get("global_resource_config", ""))

    @global_resource_config.setter
    def global_resource_config(self, config: str) -> None:
        check_type("global_resource_config", config, str)
        self._set("global_resource_config", config, "llm.GlobalResourceConfig", config)

    @property
    def enable_switch_role(self) -> bool:
        return bool(self._values.get("enable_switch_role", False))

    @enable_switch_role.setter
    def enable_switch_role(self, enable_switch_role: bool) -> None:
        check_type("enable_switch_role", enable_switch_role, bool)
        self._values["enable_switch_role"] = enable_switch_role
        if enable_switch_role:
            self._options["llm.EnableSwitchRole"] = "1"
        else:
            self._options.pop("llm.EnableSwitchRole", None)

    @property
    def cluster_info(self) -> str:
        """JSON text; dotted addresses in ``listen_ip_info[].ip`` become integers."""
        return str(self._values.get("cluster_info", ""))

    @cluster_info.setter
    def cluster_info(self, cluster_info: str) -> None:
        check_type("cluster_info", cluster_info, str)
        self._set("cluster_info", cluster_info, "llm.ClusterInfo", _numeric_ips(cluster_info))

    @property
    def output_max_size(self) -> int | None:
        return self._values.get("output_max_size")

    @output_max_size.setter
    def output_max_size(self, output_max_size: int) -> None:
        check_type("output_max_size", output_max_size, int)
        self._set("output_max_size", output_max_size, "llm.OutputMaxSize", str(output_max_size))

    @property
    def mem_utilization(self) -> float:
        return float(self._values.get("mem_utilization", _DEFAULT_MEM_UTILIZATION))

    @mem_utilization.setter
    def mem_utilization(self, mem_utilization: float) -> None:
        check_type("mem_utilization", mem_utilization, float)
        check(0.0 <= mem_utilization <= 1.0, f"mem_utilization {mem_utilization} is not in [0, 1]")
        self._set("mem_utilization", mem_utilization, "llm.MemoryUtilization", str(mem_utilization))

    @property
    def transport(self) -> str:
        """How bytes come here: auto, shm, cma or nixl. An extension of the vendor's API."""
        return str(self._values.get("transport", "auto"))

    @transport.setter
    def transport(self, transport: str) -> None:
        check_type("transport", transport, str)
        self._set("transport", transport, "llmdd.Transport", transport)

    @property
    def share_memory(self) -> bool:
        """Whether peers of this host may map registered memory. Without, it stays private and they
        copy it by cross-memory attach; this process maps theirs all the same. An extension of the
        vendor's API."""
        return bool(self._values.get("share_memory", True))

    @share_memory.setter
    def share_memory(self, share_memory: bool) -> None:
        check_type("share_memory", share_memory, bool)
        self._set("share_memory", share_memory, "llmdd.ShareMemory", "1" if share_memory else "0")

    @property
    def staging_mib(self) -> int:
        """Staging memory of each link over NIXL, in MiB. An extension of the vendor's API."""
        return int(self._values.get("staging_mib", 64))

    @staging_mib.setter
    def staging_mib(self, staging_mib: int) -> None:
        check_uint32("staging_mib", staging_mib)
        self._set("staging_mib", staging_mib, "llmdd.StagingMib", str(staging_mib))

    @property
    def link_secret(self) -> str:
        """What a peer must know to link to this process over NIXL; it gives it as
        ``LLMClusterInfo.link_secret``. Empty: whoever reaches the port. An extension of the
        vendor's API."""
        return str(self._values.get("link_secret", ""))

    @link_secret.setter
    def link_secret(self, link_secret: str) -> None:
        self._set_text("link_secret", link_secret, "llmdd.LinkSecret")


LlmConfig = LLMConfig


def _numeric_ips(cluster_info: str) -> str:
    try:
        document = json.loads(cluster_info)
        for entry in document.get("listen_ip_info", []):
            entry["ip"] = trans_str_ip(entry["ip"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"cluster_info is not the expected JSON: {error}")
    return json.dumps(document)
