"""Values of the LLM-DataDist API, as far as the connector uses them."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any, NamedTuple


class LLMRole(IntEnum):
    PROMPT = 1
    DECODER = 2
    MIX = 3


class DataType(Enum):
    DT_UINT8 = 4


class LLMStatusCode(IntEnum):
    LLM_SUCCESS = 0
    LLM_KV_CACHE_NOT_EXIST = 0x5010B002
    LLM_PARAM_INVALID = 0x5010B005
    LLM_NOT_YET_LINK = 0x5010B007
    LLM_ALREADY_LINK = 0x5010B008
    LLM_LINK_FAILED = 0x5010B009
    LLM_TIMEOUT = 0x5010B01A
    LLM_FAILED = 0xFFFFFFFF


class LLMException(RuntimeError):
    def __init__(
        self, *args: object, status_code: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
    ) -> None:
        super().__init__(*args)
        self.status_code = status_code


class LLMConfig:
    """Options are attributes; what the connector set is what ``init`` gets."""

    def __init__(self) -> None:
        self.enable_cache_manager = False
        self.enable_remote_cache_accessible = False
        self.sync_kv_timeout = 1000
        self.listen_ip_info = ""

    def generate_options(self) -> dict[str, Any]:
        return dict(vars(self))


class LLMClusterInfo:
    def __init__(self) -> None:
        self.remote_cluster_id = 0
        self.local_ip_info: list[tuple[str, int]] = []
        self.remote_ip_info: list[tuple[str, int]] = []

    def append_local_ip_info(self, ip: str, port: int) -> None:
        self.local_ip_info.append((ip, port))

    def append_remote_ip_info(self, ip: str, port: int) -> None:
        self.remote_ip_info.append((ip, port))


class CacheDesc(NamedTuple):
    num_tensors: int
    shape: list[int]
    data_type: DataType

    @property
    def num_blocks(self) -> int:
        return self.shape[0]

    @property
    def block_len(self) -> int:
        return self.shape[1]


class BlocksCacheKey(NamedTuple):
    prompt_cluster_id: int
    model_id: int = 0


class Cache(NamedTuple):
    cache_id: int
    cache_desc: CacheDesc
    per_device_tensor_addrs: list[list[int]]
