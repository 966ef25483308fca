"""The submodules that programs import from ``llm_datadist.v2``."""
