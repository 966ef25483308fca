"""What the engine needs, read from the option strings of ``LLMDataDist.init``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from vllm_llmdd_connector.datadist.checks import check, check_elements, check_type
from vllm_llmdd_connector.datadist.cluster_info import ip_text, trans_str_ip
from vllm_llmdd_connector.datadist.nixl import find_nixl_library
from vllm_llmdd_connector.datadist.status import LLMStatusCode, fail
from vllm_llmdd_connector.datadist.types import LLMRole

__all__ = ["EngineSettings", "listen_address", "read_settings"]

_CACHE_MANAGER = "llm.EnableCacheManager"
_REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
_LOCAL_COMM_RES = "llm.LocalCommRes"
_BACKEND = "llm.TransferBackend"
_LISTEN = "llm.listenIpInfo"
_TIMEOUT = "llm.SyncKvCacheWaitTime"
_FLOW_MEMORY = "ge.flowGraphMemMaxSize"
_DEVICE = "ge.exec.deviceId"
_DEVICE_POOL = "llm.MemPoolConfig"
_HOST_POOL = "llm.HostMemPoolConfig"
_CLUSTER_INFO = "llm.ClusterInfo"
_SWITCH_ROLE = "llm.EnableSwitchRole"
_LINK_TIME = "llm.LinkTotalTime"
_LINK_RETRIES = "llm.LinkRetryCount"
_TRANSPORT = "llmdd.Transport"
_LINK_SECRET = "llmdd.LinkSecret"
_STAGING = "llmdd.StagingMib"
_SHARE_MEMORY = "llmdd.ShareMemory"
_LINK_TIME_VARIABLE = "HCCL_CONNECT_TIMEOUT"  # the vendor's default for link()

_DEFAULT_SYNC_KV_TIMEOUT_MS = 1000
_DEFAULT_LINK_TIME_S = "120"
_MAX_LINK_RETRIES = 100
_DEFAULT_PAGE_SHIFT = 16
_FIRST_GENERATION_PAGE_SHIFT = 9  # its tensors are aligned to 512 bytes
_PAGE_SHIFTS = range(10, 31)
_TRANSPORTS = ("auto", "shm", "cma", "nixl")
_STAGING_MIB = range(8, 4097)
_DEFAULT_STAGING_MIB = "64"

Pool = tuple[int, int]  # bytes, page shift


@dataclass(frozen=True)
class EngineSettings:
    """``listen_ip`` is empty when this process only dials; ``listen_port`` 0 picks a free port."""

    remote_access: bool
    sync_kv_timeout_ms: int
    listen_ip: str
    listen_port: int
    needs_local_ip: bool  # link_clusters insists on a local address in each cluster info
    device_pool: Pool | None
    host_pool: Pool | None
    link_total_time_ms: int  # bounds the set-up of one link()
    link_retries: int
    point_to_point: bool  # the backend has no link()
    transport: str
    link_secret: str  # empty: none
    nixl_library: str  # path; empty if NIXL is not installed or not wanted
    staging_mib: int  # of each link over NIXL
    share_memory: bool  # whether peers may map this process's registered memory
    first_generation: bool = False  # KvCacheManager, else CacheManager
    may_switch_role: bool = True


def read_settings(options: Mapping[str, str], role: LLMRole) -> EngineSettings:
    """Check the options the engine looks at; others are the vendor's and are left alone."""
    check_type("options", options, dict)
    check_elements("options", options.keys(), str)
    if _FLOW_MEMORY in options:
        _check_flow_memory(options[_FLOW_MEMORY])
    check_elements("options", options.values(), str)
    completed = _with_defaults(options)
    if completed.get(_CACHE_MANAGER) != "1":
        return _first_generation(completed, role)
    _check_device(completed)
    listen_ip, listen_port = listen_address(completed)
    return EngineSettings(
        remote_access=_flag(_REMOTE_ACCESS, completed.get(_REMOTE_ACCESS, "0")),
        sync_kv_timeout_ms=_timeout_ms(completed),
        listen_ip=listen_ip,
        listen_port=listen_port,
        needs_local_ip=not completed.get(_LOCAL_COMM_RES),
        device_pool=_pool(_DEVICE_POOL, completed),
        host_pool=_pool(_HOST_POOL, completed),
        link_total_time_ms=_link_time_s(completed) * 1000,
        link_retries=_link_retries(completed),
        point_to_point=_BACKEND in completed,
        **_transport(completed),
    )


def _first_generation(options: Mapping[str, str], role: LLMRole) -> EngineSettings:
    """A PROMPT listens. Caches come from a pool as large as the machine's memory, of which the
    kernel supplies what is touched, unless ``ge.flowGraphMemMaxSize`` says less."""
    if ";" in options.get(_DEVICE, ""):
        fail("this engine has one device per process", LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    _check_device(options)
    listen_ip, listen_port = _prompt_address(options) if role == LLMRole.PROMPT else ("", 0)
    memory = int(options.get(_FLOW_MEMORY, "0")) or _machine_memory()
    return EngineSettings(
        remote_access=False,
        sync_kv_timeout_ms=_timeout_ms(options),
        listen_ip=listen_ip,
        listen_port=listen_port,
        needs_local_ip=True,
        device_pool=(memory, _FIRST_GENERATION_PAGE_SHIFT),
        host_pool=None,
        link_total_time_ms=_link_time_s(options) * 1000,
        link_retries=_link_retries(options),
        point_to_point=False,
        **_transport(options),
        first_generation=True,
        may_switch_role=options.get(_SWITCH_ROLE) == "1",
    )


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _prompt_address(options: Mapping[str, str]) -> tuple[str, int]:
    if _CLUSTER_INFO in options:
        return _cluster_info_address(options[_CLUSTER_INFO])
    check(bool(options.get(_LISTEN)), f"a PROMPT needs {_LISTEN}")
    return listen_address(options)


def _cluster_info_address(text: str) -> tuple[str, int]:
    try:
        (address,) = json.loads(text)["listen_ip_info"]
        ip, port = address["ip"], int(address["port"])
        return ip_text(trans_str_ip(ip)), port
    except (ValueError, KeyError, TypeError) as error:
        fail(f"{_CLUSTER_INFO} must be JSON with one entry in listen_ip_info: {error!r}")


def _with_defaults(options: Mapping[str, str]) -> dict[str, str]:
    completed = dict(options)
    if _LOCAL_COMM_RES in completed:
        completed.setdefault(_CACHE_MANAGER, "1")
        completed.setdefault(_REMOTE_ACCESS, "1")
        check(completed[_CACHE_MANAGER] == "1", f"{_LOCAL_COMM_RES} needs EnableCacheManager 1")
    if _BACKEND in completed:
        check(completed[_BACKEND] == "hixl", f"unknown backend {completed[_BACKEND]!r}")
        completed.setdefault(_REMOTE_ACCESS, "1")
        check(completed.get(_CACHE_MANAGER) == "1", f"{_BACKEND} needs EnableCacheManager 1")
        check(completed[_REMOTE_ACCESS] == "1", f"{_BACKEND} needs EnableRemoteCacheAccessible 1")
        check(bool(completed.get(_LISTEN)), f"{_BACKEND} needs {_LISTEN}")
    return completed


def _flag(key: str, text: str) -> bool:
    check(text in ("0", "1"), f"{key} must be 0 or 1, got {text!r}")
    return text == "1"


def _timeout_ms(options: Mapping[str, str]) -> int:
    text = options.get(_TIMEOUT, "0")
    check(text.isascii() and text.isdigit(), f"{_TIMEOUT} must be a number of ms, got {text!r}")
    check(int(text) < 2**31, f"{_TIMEOUT} {text} is over {2**31 - 1} ms")
    return int(text) or _DEFAULT_SYNC_KV_TIMEOUT_MS


def _number(key: str, text: str) -> int:
    check(text.isascii() and text.isdigit(), f"{key} must be a number, got {text!r}")
    return int(text)


def _link_time_s(options: Mapping[str, str]) -> int:
    seconds = _number(_LINK_TIME, options.get(_LINK_TIME, "0"))
    check(seconds < 2**32, f"{_LINK_TIME} {seconds} is outside [0, {2**32})")
    if seconds == 0:
        text = os.environ.get(_LINK_TIME_VARIABLE, _DEFAULT_LINK_TIME_S)
        seconds = _number(_LINK_TIME_VARIABLE, text)
    return seconds


def _link_retries(options: Mapping[str, str]) -> int:
    retries = _number(_LINK_RETRIES, options.get(_LINK_RETRIES, "1"))
    check(
        1 <= retries <= _MAX_LINK_RETRIES,
        f"{_LINK_RETRIES} {retries} is outside [1, {_MAX_LINK_RETRIES}]",
    )
    return retries


class _Transport(TypedDict):
    transport: str
    link_secret: str
    nixl_library: str
    staging_mib: int
    share_memory: bool


def _transport(options: Mapping[str, str]) -> _Transport:
    transport = options.get(_TRANSPORT, "auto")
    check(
        transport in _TRANSPORTS,
        f"transport is {transport!r}, it must be one of: {', '.join(_TRANSPORTS)}",
    )
    library = "" if transport in ("shm", "cma") else find_nixl_library()
    if transport == "nixl" and not library:
        fail(
            "transport is nixl, but NIXL is not installed; pip install 'nixl>=1.5' on both sides",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    staging_mib = _number(_STAGING, options.get(_STAGING, _DEFAULT_STAGING_MIB))
    check(
        staging_mib in _STAGING_MIB,
        f"staging_mib is {staging_mib}, it must be in [{_STAGING_MIB[0]}, {_STAGING_MIB[-1]}]",
    )
    return {
        "transport": transport,
        "link_secret": options.get(_LINK_SECRET, ""),
        "nixl_library": library,
        "staging_mib": staging_mib,
        "share_memory": _flag(_SHARE_MEMORY, options.get(_SHARE_MEMORY, "1")),
    }


def listen_address(options: Mapping[str, str]) -> tuple[str, int]:
    """The address of ``llm.listenIpInfo``; an empty ip if there is none."""
    text = options.get(_LISTEN, "")
    if not text:
        return "", 0
    parts = text.split(":")
    check(len(parts) == 2, f"{_LISTEN} must be ip:port, got {text!r}")
    ip, port = parts[0], int(parts[1])
    check(0 <= port < 2**16, f"{_LISTEN} port {port} is outside [0, {2**16})")
    check(bool(ip), f"{_LISTEN} has no ip: {text!r}")
    return ip, port


def _check_device(options: Mapping[str, str]) -> None:
    device = options.get(_DEVICE, "0")
    check(
        device.isascii() and device.isdigit(),
        f"{_DEVICE} must be one device number with a CacheManager, got {device!r}",
    )


def _check_flow_memory(size: object) -> None:
    check_type(_FLOW_MEMORY, size, str)
    assert isinstance(size, str)
    check(size.isascii() and size.isdigit(), f"{_FLOW_MEMORY} must be one number, got {size!r}")


def _pool(key: str, options: Mapping[str, str]) -> Pool | None:
    if key not in options:
        return None
    try:
        pool = json.loads(options[key])
        size, page_shift = pool["memory_size"], pool.get("page_shift", _DEFAULT_PAGE_SHIFT)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"{key} must be JSON with memory_size: {error!r}")
    check(
        isinstance(size, int) and 0 < size < 2**63,
        f"{key}: memory_size must be above 0, got {size!r}",
    )
    check(
        isinstance(page_shift, int) and page_shift in _PAGE_SHIFTS,
        f"{key}: page_shift {page_shift!r} is outside [10, 31)",
    )
    return size, page_shift
