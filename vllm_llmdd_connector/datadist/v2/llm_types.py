"""What programs import as ``llm_datadist.v2.llm_types``."""

from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from vllm_llmdd_connector.datadist.lazy import lazy_names
from vllm_llmdd_connector.datadist.transfer_config import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from vllm_llmdd_connector.datadist.types import (
    Cache,
    CacheDesc,
    DataType,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)

__getattr__ = lazy_names(__name__, "CacheTask", "KvCache")

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
