"""Loggers below vLLM's own, so that its handlers, format and level apply to the connector's
lines."""

import logging


def get_logger(name: str) -> logging.Logger:
    """The logger for a module of this package, named ``vllm.<module>``."""
    return logging.getLogger(f"vllm.{name}")


def one_line(text: str) -> str:
    """A peer's words for our log, without line ends and control characters that would forge
    others' lines."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
