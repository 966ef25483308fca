"""Asserting status codes, and conditions that another process brings about."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from contract.engines import is_vendor


@contextmanager
def refused(
    api: Any, status: str = "LLM_PARAM_INVALID", *, says: str | None = None
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block must raise an `LLMException` with this status code.

    Our engine's sentence contains `says`; the vendor's refusals have none.
    """
    with pytest.raises(api.LLMException) as caught:
        yield caught
    assert caught.value.status_code == api.LLMStatusCode[status], str(caught.value)
    if says is not None:
        check_sentence(api, str(caught.value), says)


def check_sentence(api: Any, text: str, says: str) -> None:
    if is_vendor(api):
        assert re.fullmatch(r"\[\w+\] failed, error code is \S+", text)
    else:
        assert says in text


def explains(side: Any, cluster_id: int, *words: str) -> bool:
    """Whether `last_link_error` has these words; the vendor's engine has no such method."""
    text = side.link_error(cluster_id)
    return text is None or all(word in text for word in words)


def none_error(api: Any) -> tuple[type[Exception], ...]:
    """What `None` in place of an object ends in: the vendor notices it late."""
    return (TypeError, AttributeError) if is_vendor(api) else (TypeError,)


def wait_until(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Return as soon as the condition holds."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.001)
