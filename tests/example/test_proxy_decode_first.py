"""The proxy's decode-first flow: D asks for its prefill, and all that may go wrong in that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from fake_vllm import (
    PARAMS,
    Behaviour,
    Body,
    Cluster,
    answer_with,
    cluster,
    decode_answer,
    drop_connection,
    hang,
)
from flows import Flow, FlowOptions


def asked_by(request_id: str) -> Body:
    """What D posts."""
    return {
        "token_ids": [],
        "request_id": request_id,
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_host": "127.0.0.1",
        "remote_port": 7200,
        "transfer_id": "drawn by D",
    }


def id_at_d(request: web.Request) -> str:
    """As vLLM makes it of the X-Request-Id."""
    given = request.headers["X-Request-Id"]
    return f"chatcmpl-{given}" if "chat" in request.path else f"cmpl-{given}-0"


class AskingD:
    """D's side: asks, keeps the status of each answer, then decodes."""

    def __init__(self, times: int = 1, waits: bool = True) -> None:
        self.times = times
        self.waits = waits
        self.statuses: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def __call__(self, request: web.Request, body: Body) -> web.StreamResponse:
        url = body["kv_transfer_params"]["metaserver"]
        posts = [self._post(url, asked_by(id_at_d(request))) for _ in range(self.times)]
        self.tasks = [asyncio.create_task(post) for post in posts]
        if self.waits:
            await asyncio.gather(*self.tasks)
        return await decode_answer(request, body)

    async def _post(self, url: str, params: Body) -> None:
        async with aiohttp.ClientSession() as session, session.post(url, json=params) as answer:
            self.statuses.append(answer.status)


@asynccontextmanager
async def decode_first(prefill: int = 1) -> AsyncIterator[Cluster]:
    async with cluster(prefill, options=FlowOptions(Flow.DECODE_FIRST)) as c:
        yield c


async def post_directly(c: Cluster, data: bytes | Body) -> tuple[int, str]:
    given = {"data": data} if isinstance(data, bytes) else {"json": data}
    async with c.client.post(c.url + "/v1/metaserver", **given) as answer:
        return answer.status, (await answer.json())["error"]["type"]


class TestDispatch:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_p_gets_the_clients_request_with_what_d_posted(self, path: str) -> None:
        async with decode_first() as c:
            c.decode[0].behaviour = asking = AskingD()
            status, answer, headers = await c.post({"prompt": "hello", "max_tokens": 5}, path)
            assert (status, answer["choices"][0]["text"]) == (200, "out")
            assert asking.statuses == [200]
            request_id = c.sent_to_p()["kv_transfer_params"]["request_id"]
            assert c.sent_to_p() == {
                "prompt": "hello",
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": asked_by(request_id),
            }
            assert headers["X-Request-Id"] in request_id
            assert c.prefill[0].seen[0].path == path
            assert c.proxy.counters.metaserver_posts == 1

    async def test_next_prefill_server_takes_over(self) -> None:
        """D is not told in advance which P it will be: P tells it."""
        async with decode_first(prefill=2) as c:
            await c.prefill[0].stop()
            c.decode[0].behaviour = asking = AskingD()
            assert (await c.post({"prompt": "hello"}))[0] == 200
            assert asking.statuses == [200]
            assert len(c.prefill[1].seen) == 1

    async def test_a_repeated_post_is_one_prefill(self) -> None:
        async with decode_first() as c:
            c.decode[0].behaviour = asking = AskingD(times=3)
            await c.post({"prompt": "hello"})
            assert asking.statuses == [200, 200, 200]
            assert len(c.prefill[0].seen) == 1

    @pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}])
    async def test_bodies_of_several_requests_go_by_pull(self, body: Body) -> None:
        async with decode_first() as c:
            await c.post({"prompt": "hello", **body})
            assert c.sent_to_d()["kv_transfer_params"] == PARAMS

    async def test_a_request_id_in_use_goes_by_pull(self) -> None:
        """D's post would not say which of the two it is for."""
        async with decode_first() as c:
            c.decode[0].behaviour = hang
            first = asyncio.create_task(c.post({"prompt": "one"}, X_Request_Id="same"))
            await c.eventually(lambda: c.decode[0].seen)
            c.decode[0].behaviour = decode_answer
            assert (await c.post({"prompt": "two"}, X_Request_Id="same"))[0] == 200
            assert c.sent_to_d()["kv_transfer_params"] == PARAMS
            first.cancel()
            await c.eventually(lambda: not len(c.proxy.flows.metaserver))


class TestFailure:
    @pytest.mark.parametrize(
        "behaviour", [drop_connection, answer_with(500, "died"), answer_with(400, "too long")]
    )
    async def test_a_failed_prefill_is_502_to_d_whose_answer_counts(
        self, behaviour: Behaviour
    ) -> None:
        async with decode_first() as c:
            c.prefill[0].behaviour = behaviour
            c.decode[0].behaviour = asking = AskingD()
            assert (await c.post({"prompt": "hello"}))[0] == 200
            assert asking.statuses == [502]
            assert c.proxy.counters.prefills_failed == 1

    async def test_all_prefill_servers_down_is_502_to_d(self) -> None:
        async with decode_first() as c:
            await c.prefill[0].stop()
            c.decode[0].behaviour = asking = AskingD()
            assert (await c.post({"prompt": "hello"}))[0] == 200
            assert asking.statuses == [502]

    async def test_an_unknown_id_is_404(self) -> None:
        async with decode_first() as c:
            assert await post_directly(c, asked_by("cmpl-x-0")) == (404, "unknown_request")
            assert c.prefill[0].seen == []

    async def test_a_request_that_is_over_is_404(self) -> None:
        async with decode_first() as c:
            await c.post({"prompt": "hello"}, X_Request_Id="r")
            assert await post_directly(c, asked_by("cmpl-r-0")) == (404, "unknown_request")
            assert len(c.proxy.flows.metaserver) == 0

    @pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"request_id": 7}', b"[" * 100_000])
    async def test_what_is_no_post_of_d_is_400(self, data: bytes) -> None:
        async with decode_first() as c:
            assert (await post_directly(c, data))[0] == 400

    async def test_a_d_that_ends_its_post_does_not_end_the_prefill(self) -> None:
        async with decode_first() as c:
            prefilling, decoding = asyncio.Event(), asyncio.Event()

            async def prefill(request: web.Request, body: Body) -> web.StreamResponse:
                await prefilling.wait()
                return await answer_with(200, {"kv_transfer_params": PARAMS})(request, body)

            async def decode(request: web.Request, body: Body) -> web.StreamResponse:
                asking = AskingD(waits=False)
                answer = asyncio.create_task(asking(request, body))
                await c.eventually(lambda: c.prefill[0].seen)
                asking.tasks[0].cancel()
                await asyncio.wait(asking.tasks)
                await decoding.wait()
                return await answer

            c.prefill[0].behaviour, c.decode[0].behaviour = prefill, decode
            task = asyncio.create_task(c.post({"prompt": "hello"}))
            await c.eventually(lambda: c.prefill[0].seen)
            prefilling.set()
            await c.eventually(lambda: c.proxy.counters.prefills == 1)
            decoding.set()
            assert (await task)[0] == 200

    async def test_a_failing_d_ends_the_prefill(self) -> None:
        async with decode_first() as c:
            c.prefill[0].behaviour = hang

            async def decode(request: web.Request, body: Body) -> web.StreamResponse:
                asking = AskingD(waits=False)
                await asking(request, body)
                await c.eventually(lambda: c.prefill[0].seen)
                return web.Response(status=500, text="died")

            c.decode[0].behaviour = decode
            assert (await c.post({"prompt": "hello"}))[0] == 502
            async with asyncio.timeout(10):
                await c.prefill[0].cancelled.wait()

    async def test_a_client_that_leaves_ends_both_legs(self) -> None:
        async with decode_first() as c:
            c.prefill[0].behaviour = hang
            c.decode[0].behaviour = AskingD()
            task = asyncio.create_task(c.post({"prompt": "hello"}))
            await c.eventually(lambda: c.prefill[0].seen)
            task.cancel()
            async with asyncio.timeout(10):
                await c.prefill[0].cancelled.wait()
                await c.decode[0].cancelled.wait()
            await c.eventually(lambda: not len(c.proxy.flows.metaserver))
