"""What programs import as ``llm_datadist.utils``."""
