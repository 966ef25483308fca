"""The native synchronizer's marks by themselves."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_llmdd_connector.datadist._engine import LayerMarks


def test_wait_ends_at_its_timeout() -> None:
    marks = LayerMarks(2)
    assert marks.wait(0, 0) is False
    assert marks.wait(0, 5) is False
    marks.mark(0)
    assert marks.wait(0, 0) is True
    assert marks.wait(1, 0) is False


def test_layers_beyond_the_last() -> None:
    marks = LayerMarks(2)
    with pytest.raises(IndexError, match=r"layer 2 is outside \[0, 2\)"):
        marks.mark(2)
    assert marks.wait(2, None) is False
    assert LayerMarks(0).wait(0, None) is False


def test_many_waiters_and_markers() -> None:
    marks = LayerMarks(64)
    with ThreadPoolExecutor(16) as pool:
        waits = [pool.submit(marks.wait, layer, None) for layer in range(8)]
        for layer in range(64):
            pool.submit(marks.mark, layer)
        assert all(wait.result() for wait in waits)


@pytest.mark.parametrize("end", ["reset", "abort"])
def test_waiters_end_with_their_step(end: str) -> None:
    marks = LayerMarks(1)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(marks.wait(0, None)))
    waiter.start()
    while waiter.is_alive():  # it may begin to wait only after this step has ended
        getattr(marks, end)()
        waiter.join(0.01)
    assert answers == [False]
