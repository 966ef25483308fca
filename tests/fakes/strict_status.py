"""Status codes of the stand-in for the vendor's package, and refusals that say nothing but a code.

With ``STRICT_VENDOR_PLAIN_ENUM`` set they are a plain ``Enum``, as before CANN 9.1.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import Enum
from typing import Any, NoReturn

from vllm_llmdd_connector import datadist as ours

__all__ = ["LLMException", "LLMStatusCode", "opaque", "refuse"]

LLMStatusCode: Any = ours.LLMStatusCode
LLMException: Any = ours.LLMException


class _PlainException(RuntimeError):
    def __init__(self, *args: object, status_code: Any = None) -> None:
        super().__init__(*args)
        self._status_code = LLMStatusCode.LLM_SUCCESS if status_code is None else status_code

    @property
    def status_code(self) -> Any:
        return self._status_code


if os.environ.get("STRICT_VENDOR_PLAIN_ENUM"):
    LLMStatusCode = Enum("LLMStatusCode", {code.name: code.value for code in ours.LLMStatusCode})
    LLMException = _PlainException


def refuse(tag: str, name: str = "LLM_PARAM_INVALID") -> NoReturn:
    code = LLMStatusCode[name]
    raise LLMException(f"[{tag}] failed, error code is {code}", status_code=code) from None


@contextlib.contextmanager
def opaque(tag: str) -> Iterator[None]:
    """Our exceptions without the sentence that says what to do."""
    try:
        yield
    except ours.LLMException as error:
        refuse(tag, error.status_code.name)
