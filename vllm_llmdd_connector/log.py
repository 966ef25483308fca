"""Loggers below vLLM's own, so that its handlers, format and level apply to the connector's
lines."""

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger for a module of this package, named ``vllm.<module>``."""
    return logging.getLogger(f"vllm.{name}")
