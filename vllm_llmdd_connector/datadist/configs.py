"""What programs import as ``llm_datadist.configs``."""

from vllm_llmdd_connector.datadist.cluster_info import LLMClusterInfo
from vllm_llmdd_connector.datadist.config import LLMConfig, LlmConfig
from vllm_llmdd_connector.datadist.types import LLMRole

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig"]
