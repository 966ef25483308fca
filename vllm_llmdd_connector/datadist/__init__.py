"""The LLM-DataDist API under the vendor's names, served by this package's own engine.

The engine (csrc/, module ``_engine``) moves KV cache between processes of one host. Importing this
package needs neither torch nor numpy nor vLLM.
"""

import os

from vllm_llmdd_connector.datadist.cluster_info import LLMClusterInfo
from vllm_llmdd_connector.datadist.config import LLMConfig, LlmConfig
from vllm_llmdd_connector.datadist.datadist import LLMDataDist
from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from vllm_llmdd_connector.datadist.lazy import lazy_names
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

# The vendor's package does so when it is imported, and programs may rely on it for their children.
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")

__getattr__ = lazy_names(
    __name__,
    "CacheTask",
    "KvCache",
    "KvCacheManager",
    "NativeLayerSynchronizer",
    "Tensor",
    "TensorDesc",
)

# In the vendor's order, which `from ... import *` shows.
__all__ = [  # noqa: RUF022
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
    "TensorDesc",
    "Tensor",
    "KvCacheManager",
]
