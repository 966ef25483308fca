"""What programs import as ``llm_datadist.v2.llm_datadist``."""

from vllm_llmdd_connector.datadist.datadist import LLMDataDist

__all__ = ["LLMDataDist"]
