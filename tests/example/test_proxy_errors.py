"""What a client is told when a server is down, breaks off or refuses, and what is tried again."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from fake_vllm import PARAMS, PIECES, Body, answer_with, cluster, drop_connection, hang
from legs import Limits


class TestServerDown:
    async def test_next_prefill_server_takes_over(self) -> None:
        async with cluster(prefill=2) as c:
            await c.prefill[0].stop()
            for _ in range(3):
                status, _, _ = await c.post({"prompt": "hello"})
                assert status == 200
            assert len(c.prefill[1].seen) == 3

    async def test_refusing_server_is_asked_last_for_a_while(self) -> None:
        async with cluster(prefill=2) as c:
            await c.prefill[0].stop()
            for _ in range(4):
                await c.post({"prompt": "hello"})
            assert c.proxy.counters.retries == 1

    async def test_next_decode_server_gets_the_same_params(self) -> None:
        """The first one never received the request, so P's blocks are still there to be read."""
        async with cluster(decode=2) as c:
            await c.decode[0].stop()
            status, _, _ = await c.post({"prompt": "hello"})
            assert status == 200
            assert c.sent_to_d(1)["kv_transfer_params"] == PARAMS
            assert len(c.prefill[0].seen) == 1

    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    async def test_all_servers_of_a_stage_down_is_503_naming_each(self, stage: str) -> None:
        async with cluster(prefill=2, decode=2) as c:
            servers = c.prefill if stage == "prefill" else c.decode
            for server in servers:
                await server.stop()
            status, answer, _ = await c.post({"prompt": "hello"}, X_Request_Id="r1")
            error = answer["error"]
            assert (status, error["code"], error["stage"]) == (503, 503, stage)
            assert error["type"] == f"{stage}_unavailable"
            assert error["request_id"] == "r1"
            assert all(server.url in error["message"] for server in servers)
            assert "Connection refused" in error["message"]
            assert f"--{stage}" in error["message"]
            if stage == "prefill":
                assert all(server.seen == [] for server in c.decode)

    async def test_server_that_came_back_is_used_again(self) -> None:
        async with cluster() as c:
            c.prefill[0].behaviour = drop_connection
            assert (await c.post({"prompt": "hello"}))[0] == 502
            c.prefill[0].behaviour = answer_with(200, {"kv_transfer_params": PARAMS})
            assert (await c.post({"prompt": "hello"}))[0] == 200


class TestServerBreaksOff:
    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_no_other_server_is_tried(self, stage: str, stream: bool) -> None:
        async with cluster(prefill=2, decode=2) as c:
            servers = c.prefill if stage == "prefill" else c.decode
            for server in servers:
                server.behaviour = drop_connection
            status, answer, _ = await c.post({"prompt": "hello", "stream": stream})
            assert (status, answer["error"]["type"]) == (502, f"{stage}_broke_off")
            assert answer["error"]["server"] == servers[0].url
            assert [len(server.seen) for server in servers] == [1, 0]

    async def test_a_broken_stream_ends_in_an_error_and_without_done(self) -> None:
        async with cluster() as c:

            async def half(request: web.Request, body: Body) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(PIECES[0])
                assert request.transport is not None
                request.transport.abort()
                return response

            c.decode[0].behaviour = half
            body = {"prompt": "hello", "stream": True}
            async with c.client.post(c.url + "/v1/completions", json=body) as answer:
                text = (await answer.read()).decode()
            assert "decode_broke_off" in text
            assert c.decode[0].url in text
            assert "[DONE]" not in text
            assert c.proxy.counters.errors == {"decode_broke_off": 1}

    async def test_half_an_answer_that_is_no_stream_becomes_502(self) -> None:
        async with cluster() as c:

            async def half(request: web.Request, body: Body) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "application/json"})
                response.content_length = 100
                await response.prepare(request)
                await response.write(b'{"choices"')
                assert request.transport is not None
                request.transport.close()
                return response

            c.decode[0].behaviour = half
            status, answer, _ = await c.post({"prompt": "hello"})
            assert (status, answer["error"]["type"]) == (502, "decode_broke_off")


class TestServerAnswersWithError:
    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    @pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
    async def test_a_refused_request_is_passed_on_as_it_is(self, stage: str, status: int) -> None:
        async with cluster() as c:
            refusal = {"error": {"message": "prompt too long", "code": status}}
            server = (c.prefill if stage == "prefill" else c.decode)[0]
            server.behaviour = answer_with(status, refusal)
            assert (await c.post({"prompt": "hello"}))[:2] == (status, refusal)

    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    async def test_a_failing_server_is_502_naming_server_and_cause(self, stage: str) -> None:
        async with cluster(prefill=2, decode=2) as c:
            servers = c.prefill if stage == "prefill" else c.decode
            servers[0].behaviour = answer_with(500, {"error": {"message": "engine died"}})
            status, answer, _ = await c.post({"prompt": "hello", "stream": True})
            error = answer["error"]
            assert (status, error["type"]) == (502, f"{stage}_failed")
            assert error["upstream_status"] == 500
            assert error["server"] == servers[0].url
            assert "engine died" in error["message"]
            assert servers[1].seen == []

    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    async def test_a_slow_server_is_504_and_its_leg_is_ended(self, stage: str) -> None:
        async with cluster(limits=Limits(prefill_s=0.1, decode_s=0.1)) as c:
            server = (c.prefill if stage == "prefill" else c.decode)[0]
            server.behaviour = hang
            status, answer, _ = await c.post({"prompt": "hello"})
            assert (status, answer["error"]["type"]) == (504, f"{stage}_timeout")
            assert f"--{stage}-timeout" in answer["error"]["message"]
            async with asyncio.timeout(10):
                await server.cancelled.wait()


class TestBadRequest:
    @pytest.mark.parametrize("data", [b"{", b"", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
    async def test_body_that_is_no_object_is_400_and_goes_nowhere(self, data: bytes) -> None:
        async with cluster() as c:
            async with c.client.post(c.url + "/v1/completions", data=data) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["type"] == "invalid_json"
            assert c.prefill[0].seen == []

    async def test_unknown_path_is_a_json_404(self) -> None:
        async with cluster() as c, c.client.get(c.url + "/v2") as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == 404
