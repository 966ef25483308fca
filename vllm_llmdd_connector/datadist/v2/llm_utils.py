"""What programs import as ``llm_datadist.v2.llm_utils``."""

from vllm_llmdd_connector.datadist.cluster_info import trans_str_ip
from vllm_llmdd_connector.datadist.lazy import lazy_names
from vllm_llmdd_connector.datadist.transfer_config import (
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

__getattr__ = lazy_names(__name__, "CacheTask")

__all__ = [
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "trans_str_ip",
]
