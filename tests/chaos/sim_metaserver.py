"""``MetaserverClient`` for D's that ask the simulated proxy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hub import Hub

OnPost = Callable[[dict[str, Any], Callable[[str], None]], None]
"""The proxy: takes a body, and what to call with the reason of a failure or nothing."""


class SimMetaserverClient:
    """Posts of one D; each answer comes on a thread of its own."""

    def __init__(self, hub: Hub, on_post: OnPost, latency_s: float) -> None:
        self._hub = hub
        self._latency_s = latency_s
        self._on_post = on_post
        self._open: set[str] = set()

    def post(
        self, key: str, url: str, body: dict[str, Any], on_answer: Callable[[str], None]
    ) -> None:
        task = self._hub.current
        assert task is not None
        process = task.process
        self._open.add(key)

        def tell(failure: str) -> None:
            if key in self._open:
                self._open.discard(key)
                on_answer(failure)

        def arrive(failure: str) -> None:
            self._hub.start(process, partial(tell, failure), "metaserver")

        def answer(failure: str) -> None:
            self._hub.call_later(self._latency_s, partial(arrive, failure))

        self._hub.call_later(self._latency_s, lambda: self._on_post(body, answer))

    def cancel(self, key: str) -> None:
        self._open.discard(key)

    def close(self) -> None:
        self._open.clear()
