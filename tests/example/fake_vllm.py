"""In-process stand-ins for vLLM servers, and a proxy in front of them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web
from app import Proxy, start
from flows import FlowOptions
from legs import Limits
from multidict import CIMultiDictProxy

Body = dict[str, Any]
Behaviour = Callable[[web.Request, Body], Awaitable[web.StreamResponse]]

PARAMS: Body = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "engine-of-p",
    "remote_host": "127.0.0.1",
    "remote_port": 5555,
    "llmdd": {"v": 1, "expiry": 1.5},
}
PIECES = [b'data: {"text":"a"}\n\n', b'data: {"text":"b"}\n\n', b"data: [DONE]\n\n"]


@dataclass(frozen=True)
class Seen:
    path: str
    headers: CIMultiDictProxy[str]
    body: Body


class FakeVllm:
    """Records what it is sent and answers as `behaviour` says."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.seen: list[Seen] = []
        self.cancelled = asyncio.Event()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/{path:.*}", self._post)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        # A short shutdown: tests leave requests open on purpose.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _post(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(Seen(request.path, request.headers, body))
        try:
            return await self.behaviour(request, body)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "model", "served_by": self.url}]})


async def prefill_answer(request: web.Request, body: Body) -> web.Response:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS})


async def decode_answer(request: web.Request, body: Body) -> web.StreamResponse:
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "out"}], "kv_transfer_params": None})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for piece in PIECES:
        await response.write(piece)
    return response


async def hang(request: web.Request, body: Body) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("nobody waits this long")


async def drop_connection(request: web.Request, body: Body) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def answer_with(status: int, data: Body | str) -> Behaviour:
    text = data if isinstance(data, str) else json.dumps(data)

    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        return web.Response(status=status, text=text, content_type="application/json")

    return behave


@dataclass
class Cluster:
    """Fake servers with a proxy in front of them, and a client."""

    prefill: list[FakeVllm]
    decode: list[FakeVllm]
    proxy: Proxy
    url: str
    client: aiohttp.ClientSession

    async def post(
        self, body: Body, path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Body, CIMultiDictProxy[str]]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        data = io.BytesIO(json.dumps(body).encode())
        async with self.client.post(self.url + path, data=data, headers=names) as answer:
            return answer.status, await answer.json(), answer.headers

    async def eventually(self, condition: Callable[[], object]) -> None:
        """Let the servers run until the condition holds."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    def sent_to_p(self, index: int = 0) -> Body:
        return self.prefill[index].seen[-1].body

    def sent_to_d(self, index: int = 0) -> Body:
        return self.decode[index].seen[-1].body


@asynccontextmanager
async def cluster(
    prefill: int = 1,
    decode: int = 1,
    limits: Limits | None = None,
    options: FlowOptions | None = None,
) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        servers = [FakeVllm(prefill_answer) for _ in range(prefill)]
        servers += [FakeVllm(decode_answer) for _ in range(decode)]
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        p, d = servers[:prefill], servers[prefill:]
        proxy = Proxy([s.url for s in p], [s.url for s in d], limits or Limits(), options)
        runner = await start(proxy, "127.0.0.1", 0)
        stack.push_async_callback(runner.cleanup)
        client = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield Cluster(p, d, proxy, url, client)
