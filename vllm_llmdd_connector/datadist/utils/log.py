"""The logger ``LLM_DATADIST`` of programs written for the vendor's package: it writes to stdout.

``ASCEND_GLOBAL_LOG_LEVEL`` sets its level: 0 debug, 1 info, 2 warning, 3 error (the default). The
engine's own messages go to the logger ``vllm_llmdd_connector.datadist`` instead.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["debug", "error", "info", "logger", "warning"]

_NAME = "LLM_DATADIST"
_LEVEL_VARIABLE = "ASCEND_GLOBAL_LOG_LEVEL"
_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}
_FORMAT = (
    f"[%(levelname)s] {_NAME}(%(process)d,%(processName)s):%(asctime)s.%(msecs)03d "
    "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s:%(message)s"
)


class _Stdout(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stdout`` is at that moment, so redirections are followed."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stdout
        super().emit(record)


def _make() -> logging.Logger:
    made = logging.getLogger(_NAME)
    made.setLevel(_LEVELS.get(os.environ.get(_LEVEL_VARIABLE, ""), logging.ERROR))
    made.propagate = False
    if not made.handlers:
        handler = _Stdout(sys.stdout)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%Y-%m-%d-%H:%M:%S"))
        made.addHandler(handler)
    return made


logger = _make()
debug = logger.debug
info = logger.info
warning = logger.warning
error = logger.error
