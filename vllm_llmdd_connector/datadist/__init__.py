"""The LLM-DataDist API under the vendor's names, served by this package's own engine.

The engine (csrc/, module ``_engine``) moves KV cache between processes of one host. Importing this
package needs neither torch nor numpy nor vLLM.
"""

from vllm_llmdd_connector.datadist.cache_manager import CacheManager
from vllm_llmdd_connector.datadist.cache_task import CacheTask
from vllm_llmdd_connector.datadist.cluster_info import LLMClusterInfo
from vllm_llmdd_connector.datadist.config import LLMConfig, LlmConfig
from vllm_llmdd_connector.datadist.datadist import LLMDataDist
from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from vllm_llmdd_connector.datadist.native_synchronizer import NativeLayerSynchronizer
from vllm_llmdd_connector.datadist.status import LLMException, LLMStatusCode, Status
from vllm_llmdd_connector.datadist.transfer_config import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from vllm_llmdd_connector.datadist.types import (
    Cache,
    CacheDesc,
    DataType,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "DataType",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "NativeLayerSynchronizer",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
