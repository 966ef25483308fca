"""KV connector for vLLM over the LLM-DataDist API.

Importing this package is cheap on purpose: vLLM's frontend imports it, and so does a machine
without vLLM, torch or device libraries.
"""

__all__ = ["__version__", "register"]

__version__ = "0.1.0"


def register() -> None:
    """Register ``LLMDataDistConnector`` with vLLM (entry point group ``vllm.general_plugins``).

    vLLM calls this once in every process it starts, so a second call must not fail.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "LLMDataDistConnector"
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "vllm_llmdd_connector.connector", name)
