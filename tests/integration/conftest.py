"""Set-up: vLLM's base classes, imported without vLLM's and torch's complaints."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

with warnings.catch_warnings():
    # torch's own use of torch.jit, met while vLLM imports torch's compiler.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")
    import vllm_llmdd_connector.connector  # noqa: F401
