"""What the engine needs, read from the option strings of ``LLMDataDist.init``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_llmdd_connector.datadist.checks import check, check_elements, check_type
from vllm_llmdd_connector.datadist.status import LLMStatusCode, fail

__all__ = ["EngineSettings", "read_settings"]

_CACHE_MANAGER = "llm.EnableCacheManager"
_REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
_LOCAL_COMM_RES = "llm.LocalCommRes"
_BACKEND = "llm.TransferBackend"
_LISTEN = "llm.listenIpInfo"
_TIMEOUT = "llm.SyncKvCacheWaitTime"
_FLOW_MEMORY = "ge.flowGraphMemMaxSize"
_DEVICE = "ge.exec.deviceId"
_POOLS = ("llm.MemPoolConfig", "llm.HostMemPoolConfig")

_DEFAULT_SYNC_KV_TIMEOUT_MS = 1000
_PAGE_SHIFTS = range(10, 31)


@dataclass(frozen=True)
class EngineSettings:
    """``listen_ip`` is empty when this process only dials; ``listen_port`` 0 picks a free port."""

    remote_access: bool
    sync_kv_timeout_ms: int
    listen_ip: str
    listen_port: int
    needs_local_ip: bool  # link_clusters insists on a local address in each cluster info


def read_settings(options: Mapping[str, str]) -> EngineSettings:
    """Check the options the engine looks at; others are the vendor's and are left alone."""
    check_type("options", options, dict)
    check_elements("options", options.keys(), str)
    if _FLOW_MEMORY in options:
        _check_flow_memory(options[_FLOW_MEMORY])
    check_elements("options", options.values(), str)
    completed = _with_defaults(options)
    if completed.get(_CACHE_MANAGER) != "1":
        fail(
            "this engine has the second-generation CacheManager only; "
            "set LLMConfig.enable_cache_manager = True",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    _check_device(completed)
    for key in _POOLS:
        if key in completed:
            _check_pool(key, completed[key])
    listen_ip, listen_port = _listen_address(completed.get(_LISTEN, ""))
    return EngineSettings(
        remote_access=_flag(_REMOTE_ACCESS, completed.get(_REMOTE_ACCESS, "0")),
        sync_kv_timeout_ms=_timeout_ms(completed),
        listen_ip=listen_ip,
        listen_port=listen_port,
        needs_local_ip=not completed.get(_LOCAL_COMM_RES),
    )


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


def _listen_address(text: str) -> tuple[str, int]:
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


def _check_pool(key: str, text: str) -> None:
    try:
        pool = json.loads(text)
        size, page_shift = pool["memory_size"], pool.get("page_shift", 16)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(f"{key} must be JSON with memory_size: {error!r}")
    check(isinstance(size, int) and size > 0, f"{key}: memory_size must be above 0, got {size!r}")
    check(page_shift in _PAGE_SHIFTS, f"{key}: page_shift {page_shift!r} is outside [10, 31)")
