"""What programs import as ``llm_datadist.v2.config``."""

from vllm_llmdd_connector.datadist.config import LLMConfig, LlmConfig
from vllm_llmdd_connector.datadist.settings import EngineSettings

__all__ = ["EngineSettings", "LLMConfig", "LlmConfig"]
