"""What programs import as ``llm_datadist.v2.cache_manager``."""

from vllm_llmdd_connector.datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
