"""Asserting status codes, and conditions that another process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def refused(api: Any, status: str = "LLM_PARAM_INVALID") -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise an `LLMException` with this status code."""
    with pytest.raises(api.LLMException) as caught:
        yield caught
    assert caught.value.status_code == api.LLMStatusCode[status], str(caught.value)


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.001)
