"""The vendor's status codes in words: what is known to be behind each, and what to do.

By name, because the vendor's enum is an ``IntEnum`` or a plain ``Enum`` depending on its version.
"""

from __future__ import annotations

from typing import Any

from vllm_llmdd_connector.errors import status_name

__all__ = ["REMEDIES", "remedy"]

_LOGS = (
    "set ASCEND_GLOBAL_LOG_LEVEL=1 on both servers and read what HCCL and LLM_DATADIST log at that "
    "time"
)

REMEDIES = {
    "LLM_FAILED": f"the vendor's package gives no reason; {_LOGS}",
    "LLM_UNKNOWN_ERROR": f"the vendor's package gives no reason; {_LOGS}",
    "LLM_TIMEOUT": (
        "the peer is stopped, dead or overloaded; raise sync_kv_timeout_ms if it is only slow, and "
        "keep HCCL_RDMA_TIMEOUT and HCCL_RDMA_RETRY_CNT shorter than that"
    ),
    "LLM_WAIT_PROCESS_TIMEOUT": (
        "the peer is stopped, dead or overloaded; raise sync_kv_timeout_ms or link_timeout_ms if "
        "it is only slow"
    ),
    "LLM_KV_CACHE_NOT_EXIST": (
        "the peer has no cache of that number: it must have registered its KV cache before the "
        "link was made; restart the server that was changed last"
    ),
    "LLM_PARAM_INVALID": (
        "the two servers do not agree; give both the same model, KV cache options, CANN version "
        "and version of this connector"
    ),
    "LLM_NOT_YET_LINK": (
        "there is no link to that cluster: the peer dropped it, or another process than expected "
        "listens at its address; the next request links again"
    ),
    "LLM_ALREADY_LINK": (
        "a link of that name is left over; it is dropped and made again, and if that does not help "
        "restart this server"
    ),
    "LLM_LINK_FAILED": (
        "nobody listens there, or the two servers cannot reach each other; check host of both "
        "servers, firewalls between them, and that both use the same CANN version"
    ),
    "LLM_UNLINK_FAILED": "the peer could not be told; nothing to do if it is gone",
    "LLM_LINK_BUSY": "another transfer uses that link; report this, the connector avoids it",
    "LLM_PROCESSING_LINK": "another link is being made; the next request links again",
    "LLM_EXIST_LINK": "links are left; restart this server",
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": "too many links at once; use fewer servers per pool",
    "LLM_FEATURE_NOT_ENABLED": (
        "this device or CANN version lacks that call; Atlas 350 and Ascend 950 need the HIXL back "
        "end, which the connector does not use"
    ),
    "LLM_OUT_OF_MEMORY": "the device has no room left; lower vLLM's gpu_memory_utilization",
    "LLM_DEVICE_OUT_OF_MEMORY": "the device has no room left; lower vLLM's gpu_memory_utilization",
    "LLM_ENGINE_FINALIZED": "this server is shutting down",
    "LLM_DEVICE_MEM_ERROR": "the NPU reports a memory error; restart this server, check the device",
    "LLM_SUSPECT_REMOTE_ERROR": (
        "the NPU suspects the peer's device; restart both servers, check both devices"
    ),
}


def remedy(status: Any) -> str:
    """What to do about a status code; codes without an entry are as opaque as ``LLM_FAILED``."""
    return REMEDIES.get(status_name(status), REMEDIES["LLM_FAILED"])
