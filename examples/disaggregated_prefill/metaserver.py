"""Where a decode server asks for its prefill: the proxy's side of the decode-first flow.

D is sent its leg with a URL and posts there, as soon as it has the request, what P needs to find
it. The post names the request by D's id for it and is answered when P has finished: 404 when no
such request waits, 502 when the prefill failed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from backends import Counters, Pool, ProxyError
from bodies import Body, prefill_body
from legs import Legs, Refused

PATH = "/v1/metaserver"

OnFailure = Callable[[Legs, Exception], None]


@dataclass
class Expected:
    """A request whose D has been sent its leg. `prefill` is P's leg once D has asked for it."""

    legs: Legs
    body: Body
    on_failure: OnFailure
    prefill: asyncio.Task[None] | None = None
    failure: Exception | None = None


class Metaserver:
    """The requests whose D may ask; each is there from its decode leg's start to its end."""

    def __init__(self, url: str, pool: Pool, counters: Counters) -> None:
        self.url = url
        """As D reaches it."""
        self._pool = pool
        self._counters = counters
        self._expected: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def can_expect(self, legs: Legs) -> bool:
        """Whether D's post could be told from another request's: clients may repeat their ids."""
        return _id_at_d(legs) not in self._expected

    def expect(self, legs: Legs, body: Body, on_failure: OnFailure) -> Expected:
        expected = Expected(legs, body, on_failure)
        self._expected[_id_at_d(legs)] = expected
        return expected

    def forget(self, legs: Legs) -> None:
        self._expected.pop(_id_at_d(legs), None)

    async def handle(self, request: web.Request) -> web.Response:
        """Send P its leg with the posted object, and answer when P has."""
        params = await _read(request)
        request_id = params["request_id"]
        expected = self._expected.get(request_id)
        if expected is None:
            raise ProxyError(404, "unknown_request", f"no request {request_id!r} waits here")
        if expected.prefill is None:
            self._counters.metaserver_posts += 1
            expected.prefill = asyncio.create_task(self._run_prefill(expected, params))
        # D repeats a post whose answer was lost, or closes it when it needs no more; neither may
        # end P's leg, which ends with D's.
        await asyncio.wait({expected.prefill})
        if expected.prefill.cancelled():
            raise ProxyError(502, "prefill_cancelled", f"request {request_id!r} has ended")
        if expected.failure is not None:
            raise ProxyError(502, "prefill_failed", f"the prefill failed: {expected.failure}")
        return web.json_response({})

    async def _run_prefill(self, expected: Expected, params: Body) -> None:
        try:
            await expected.legs.prefill(self._pool, prefill_body(expected.body, params))
        except (ProxyError, Refused) as error:
            expected.failure = error
            expected.on_failure(expected.legs, error)


async def _read(request: web.Request) -> Body:
    try:
        params = json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise ProxyError(400, "invalid_json", f"the body is not JSON: {error}") from error
    if not isinstance(params, dict) or not isinstance(params.get("request_id"), str):
        raise ProxyError(400, "invalid_request", "the body must be an object with a request_id")
    return params


def _id_at_d(legs: Legs) -> str:
    """vLLM's external id of a request, which is of one prompt and one answer here."""
    if legs.path.endswith("/chat/completions"):
        return f"chatcmpl-{legs.request_id}"
    return f"cmpl-{legs.request_id}-0"
