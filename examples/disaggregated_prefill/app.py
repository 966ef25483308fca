"""The proxy as an aiohttp application: its handlers, what they pass on, how they report errors."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp
from aiohttp import web
from backends import Backend, Counters, Pool, ProxyError, Stage, none_reachable
from bodies import Body, without_client_params
from flows import FlowOptions, Flows
from legs import NETWORK_ERRORS, Answer, Legs, Limits, Refused, describe
from metaserver import PATH as METASERVER_PATH

log = logging.getLogger("proxy")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_BODY_BYTES = 64 << 20
"""Room for long prompts given as token ids and for images in chats."""
PASSED_HEADERS = ("Authorization", "traceparent", "tracestate")
_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_HEALTH_TIMEOUT_S = 2.0


class ClientGone(Exception):
    """The client closed its connection while its answer was being written."""


class Proxy:
    """The request handlers and what they share."""

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        limits: Limits,
        options: FlowOptions | None = None,
    ) -> None:
        self.counters = Counters()
        self._limits = limits
        self._prefill = _pool(Stage.PREFILL, prefill)
        self._decode = _pool(Stage.DECODE, decode)
        self.flows = Flows(options or FlowOptions(), self._prefill, self._decode, self.counters)
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._answer_errors])
        app.cleanup_ctx.append(self._keep_session)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        app.router.add_post(METASERVER_PATH, self.flows.metaserver.handle)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        return app

    async def _keep_session(self, app: web.Application) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            self._session = session
            yield
            await self.flows.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the application is not running"
        return self._session

    # One client request

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.counters.requests += 1
        body = await self._read_body(request)
        headers = _upstream_headers(request)
        legs = Legs(self._http, self.counters, self._limits, request.path, headers)
        response = web.StreamResponse(headers={"X-Request-Id": headers["X-Request-Id"]})
        try:
            async with self.flows.answer(legs, body) as answer:
                await self._pass_on(request, answer, response)
        except (asyncio.CancelledError, ClientGone) as gone:
            self.counters.client_disconnects += 1
            if isinstance(gone, asyncio.CancelledError):
                raise
        except ProxyError as error:
            error.where["request_id"] = headers["X-Request-Id"]
            raise
        return response

    async def _read_body(self, request: web.Request) -> Body:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            raise ProxyError(400, "invalid_json", f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            kind = type(body).__name__
            raise ProxyError(400, "invalid_json", f"the body must be a JSON object, not a {kind}")
        body, dropped = without_client_params(body)
        if dropped:
            self.counters.client_params_dropped += 1
            log.warning("dropped kv_transfer_params that client %s had sent", request.remote)
        return body

    async def _pass_on(
        self, request: web.Request, answer: Answer, response: web.StreamResponse
    ) -> None:
        """Send D's answer to the client: a stream piece by piece, anything else once it is whole.

        Waiting for the whole answer lets a D that dies halfway become an error with a status.
        """
        response.headers["Content-Type"] = answer.response.headers.get(
            "Content-Type", "application/json"
        )
        if answer.response.content_type != "text/event-stream":
            data = await answer.read()
            response.content_length = len(data)
            await _write(request, response, data)
            return
        response.headers["Cache-Control"] = "no-cache"
        try:
            async for piece in answer.pieces():
                await _write(request, response, piece)
        except ProxyError as error:
            if not response.prepared:
                raise
            # The client has a 200 and part of the text already; a stream without [DONE] that ends
            # in an error object is what OpenAI's clients take as a failure.
            self._note(error)
            await _write(request, response, b"\n\ndata: " + error.to_bytes() + b"\n\n")

    # The rest

    async def _models(self, request: web.Request) -> web.StreamResponse:
        tried: dict[str, str] = {}
        headers = _upstream_headers(request)
        for backend in self._decode.in_turn():
            answer = await self._get(backend.url + request.path, headers)
            if isinstance(answer, web.Response):
                return answer
            tried[backend.url] = answer
        raise none_reachable(Stage.DECODE, tried)

    async def _get(self, url: str, headers: dict[str, str]) -> web.Response | str:
        """Return the answer to pass on, or why there is none."""
        try:
            async with self._http.get(url, headers=headers) as answer:
                return web.Response(
                    body=await answer.read(),
                    status=answer.status,
                    content_type=answer.content_type,
                )
        except (*NETWORK_ERRORS, TimeoutError) as error:
            return describe(error)

    async def _health(self, request: web.Request) -> web.Response:
        """Answer 200 while requests can be served: a server of each stage is healthy."""
        prefill, decode = await asyncio.gather(
            self._look_at(self._prefill), self._look_at(self._decode)
        )
        serving = all(any(server["healthy"] for server in stage) for stage in (prefill, decode))
        whole = all(server["healthy"] for server in prefill + decode)
        report = {
            "status": ("ok" if whole else "degraded") if serving else "down",
            "prefill": prefill,
            "decode": decode,
            "counters": asdict(self.counters),
        }
        return web.json_response(report, status=200 if serving else 503)

    async def _look_at(self, pool: Pool) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._probe(backend) for backend in pool.backends))

    async def _probe(self, backend: Backend) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_HEALTH_TIMEOUT_S)
        try:
            async with self._http.get(backend.url + "/health", timeout=timeout) as answer:
                healthy, detail = answer.status == 200, f"status {answer.status}"
        except (*NETWORK_ERRORS, TimeoutError) as error:
            healthy, detail = False, describe(error)
        return {"url": backend.url, "healthy": healthy, "detail": detail}

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as refused:
            return web.Response(
                body=refused.body, status=refused.status, content_type=refused.content_type
            )
        except web.HTTPException as error:
            return _error_response(ProxyError(error.status, "invalid_request", error.reason))
        except ProxyError as error:
            self._note(error)
            return _error_response(error)

    def _note(self, error: ProxyError) -> None:
        self.counters.count_error(error.kind)
        if error.status >= 500:
            log.error("%s", error)


def _pool(stage: Stage, urls: Sequence[str]) -> Pool:
    backends = [Backend(normalise_url(url), stage) for url in urls]
    return Pool(stage, backends, lambda: asyncio.get_running_loop().time())


def normalise_url(url: str) -> str:
    """Accept `host:port` as well as a URL; a trailing slash or /v1 is dropped."""
    full = url if "://" in url else f"http://{url}"
    return full.rstrip("/").removesuffix("/v1")


def _upstream_headers(request: web.Request) -> dict[str, str]:
    """The same request id on both legs lets P's and D's logs be read side by side."""
    headers = {name: request.headers[name] for name in PASSED_HEADERS if name in request.headers}
    given = request.headers.get("X-Request-Id", "")
    headers["X-Request-Id"] = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
    return headers


def _error_response(error: ProxyError) -> web.Response:
    return web.Response(body=error.to_bytes(), status=error.status, content_type="application/json")


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    try:
        if not response.prepared:
            await response.prepare(request)
        await response.write(data)
    except ConnectionError as error:
        raise ClientGone from error


async def start(proxy: Proxy, host: str, port: int) -> web.AppRunner:
    """Start serving in the running loop; `await runner.cleanup()` ends it.

    Handlers are cancelled when their client goes away, so that both servers stop working for it.
    """
    runner = web.AppRunner(proxy.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    metaserver = proxy.flows.metaserver
    if not metaserver.url:
        host, port = runner.addresses[0][:2]
        metaserver.url = f"http://{host}:{port}{METASERVER_PATH}"
    return runner
