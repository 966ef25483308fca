"""Asserting the status code of an `LLMException`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(api: Any, status: str = "LLM_PARAM_INVALID") -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise an `LLMException` with this status code."""
    with pytest.raises(api.LLMException) as caught:
        yield caught
    assert caught.value.status_code == api.LLMStatusCode[status], str(caught.value)
