"""The two HTTP exchanges behind one client request: prefill at P and decode at D.

A leg is sent to another server only when the first one never received it (no connection was made).
Anything later is not repeated: P or D may already have done the work, and a request that brings
down one server should not be offered to the next. Every connection is used once; a kept one may be
closed by the server just as it is used again, which cannot be told from a server that died.

A cancelled handler (the client went away) leaves these functions by CancelledError, which closes
the connection; vLLM takes that as an abort.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from backends import Backend, Counters, Pool, broke_off, failed, none_reachable, timed_out
from bodies import Body

log = logging.getLogger("proxy")

NETWORK_ERRORS = (aiohttp.ClientError, ConnectionError)


@dataclass(frozen=True)
class Limits:
    """Seconds. A stage's limit covers the wait for an answer's first byte; None is no limit."""

    connect_s: float = 5.0
    prefill_s: float | None = 600.0
    decode_s: float | None = None


class Refused(Exception):
    """A server refused the request itself (4xx): its answer goes to the client as it is."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.content_type = content_type


@dataclass(frozen=True)
class Answer:
    """A server's answer whose headers are there and whose body is still to be read."""

    backend: Backend
    response: aiohttp.ClientResponse

    async def read(self) -> bytes:
        try:
            return await self.response.read()
        except NETWORK_ERRORS as error:
            raise broke_off(self.backend, describe(error)) from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, in the pieces the server sent."""
        try:
            async for piece in self.response.content.iter_any():
                yield piece
        except NETWORK_ERRORS as error:
            raise broke_off(self.backend, describe(error)) from error

    async def raise_for_status(self) -> None:
        status = self.response.status
        if status < 400:
            return
        data = await self.read()
        if status < 500:
            raise Refused(status, data, self.response.content_type)
        raise failed(self.backend, status, data.decode(errors="replace"))


@dataclass(frozen=True)
class Legs:
    """One client request's way through the servers: its path and headers are those of both legs."""

    session: aiohttp.ClientSession
    counters: Counters
    limits: Limits
    path: str
    headers: dict[str, str]

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]

    async def prefill(
        self, pool: Pool, body: Body, backends: Sequence[Backend] | None = None
    ) -> Body | None:
        """Run the prefill; return P's `kv_transfer_params`, None when it gave none.

        `backends` are those of the pool that may be asked; by default all, in their turn.
        """
        async with self._post(pool, body, self.limits.prefill_s, backends) as answer:
            params = _params_of(await answer.read())
        self.counters.prefills += 1
        if params is not None:
            answer.backend.learn_control(params)
        return params

    @asynccontextmanager
    async def decode(self, pool: Pool, body: Body) -> AsyncIterator[Answer]:
        """Give D's answer once its headers are there."""
        async with self._post(pool, body, self.limits.decode_s) as answer:
            yield answer

    @asynccontextmanager
    async def _post(
        self,
        pool: Pool,
        body: Body,
        limit_s: float | None,
        backends: Sequence[Backend] | None = None,
    ) -> AsyncIterator[Answer]:
        answer = await self._first_answer(pool, backends or pool.in_turn(), body, limit_s)
        try:
            await answer.raise_for_status()
            yield answer
        finally:
            answer.response.close()

    async def _first_answer(
        self, pool: Pool, backends: Sequence[Backend], body: Body, limit_s: float | None
    ) -> Answer:
        """Post to the next server that accepts a connection and wait for its answer's headers."""
        tried: dict[str, str] = {}
        for backend in backends:
            self.counters.retries += bool(tried)
            answer = await self._try(backend, body, limit_s)
            if isinstance(answer, Answer):
                return answer
            tried[backend.url] = answer
            pool.rest(backend)
            log.warning("%s server %s: %s", pool.stage.value, backend.url, answer)
        raise none_reachable(pool.stage, tried)

    async def _try(self, backend: Backend, body: Body, limit_s: float | None) -> Answer | str:
        """Return the answer, or why no connection was made."""
        # From a file: aiohttp sends it in parts, while bytes of a long prompt would block the loop.
        data = io.BytesIO(json.dumps(body).encode())
        headers = {**self.headers, "Content-Type": "application/json"}
        try:
            async with asyncio.timeout(limit_s):
                url = backend.url + self.path
                response = await self.session.post(url, data=data, headers=headers)
                return Answer(backend, response)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return describe(error)
        except TimeoutError as error:
            raise timed_out(backend, limit_s or 0.0) from error
        except NETWORK_ERRORS as error:
            raise broke_off(backend, describe(error)) from error


def _params_of(data: bytes) -> Body | None:
    """Read `kv_transfer_params` out of P's answer; anything that is not an object is none."""
    try:
        answer: Any = json.loads(data)
    except ValueError:
        return None
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params else None


def describe(error: BaseException) -> str:
    """Name a network error by its cause, or by its kind when it has no text of its own."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return str(error) or type(error).__name__
