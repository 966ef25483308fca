"""The proxy in front of fake servers: both legs, streams, headers, counters."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from fake_vllm import PARAMS, PIECES, Body, answer_with, cluster, hang


class TestLegs:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_both_legs_go_to_the_clients_path(self, path: str) -> None:
        async with cluster() as c:
            status, answer, _ = await c.post({"prompt": "hello", "max_tokens": 5}, path)
            assert (status, answer["choices"][0]["text"]) == (200, "out")
            assert c.prefill[0].seen[0].path == c.decode[0].seen[0].path == path

    async def test_d_gets_the_clients_body_and_ps_params(self) -> None:
        body = {"prompt": "hello", "max_tokens": 5, "n": 2, "stream_options": None, "seed": 2**63}
        async with cluster() as c:
            await c.post(body)
            assert c.sent_to_d() == {**body, "kv_transfer_params": PARAMS}

    async def test_p_gets_one_token_and_the_six_keys(self) -> None:
        async with cluster() as c:
            await c.post({"prompt": "hello", "max_tokens": 5, "stream_options": {}, "n": 2})
            assert c.sent_to_p() == {
                "prompt": "hello",
                "max_tokens": 1,
                "stream": False,
                "n": 1,
                "kv_transfer_params": {
                    "do_remote_decode": True,
                    "do_remote_prefill": False,
                    "remote_engine_id": None,
                    "remote_block_ids": None,
                    "remote_host": None,
                    "remote_port": None,
                },
            }

    async def test_prompt_list_goes_whole_to_d_and_its_first_to_p(self) -> None:
        async with cluster() as c:
            await c.post({"prompt": [[1, 2], [3, 4]]})
            assert c.sent_to_p()["prompt"] == [1, 2]
            assert c.sent_to_d()["prompt"] == [[1, 2], [3, 4]]

    @pytest.mark.parametrize("params", [None, {}, "junk", [1]])
    async def test_params_that_are_no_object_leave_d_without_and_are_counted(
        self, params: object
    ) -> None:
        async with cluster() as c:
            c.prefill[0].behaviour = answer_with(200, {"kv_transfer_params": params})
            status, _, _ = await c.post({"prompt": "hello"})
            assert status == 200
            assert "kv_transfer_params" not in c.sent_to_d()
            assert c.proxy.counters.params_missing == 1

    async def test_prefill_answer_that_is_not_json_counts_as_no_params(self) -> None:
        async with cluster() as c:
            c.prefill[0].behaviour = answer_with(200, "<html>")
            status, _, _ = await c.post({"prompt": "hello"})
            assert status == 200
            assert c.proxy.counters.params_missing == 1

    async def test_clients_own_params_reach_no_server_and_are_counted(self) -> None:
        async with cluster() as c:
            evil = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 1}
            await c.post({"prompt": "hello", "kv_transfer_params": evil})
            assert c.sent_to_p()["kv_transfer_params"]["remote_host"] is None
            assert c.sent_to_d()["kv_transfer_params"] == PARAMS
            assert c.proxy.counters.client_params_dropped == 1

    async def test_prompt_logprobs_go_to_d_alone(self) -> None:
        async with cluster() as c:
            await c.post({"prompt": "hello", "prompt_logprobs": 1})
            assert c.prefill[0].seen == []
            assert "kv_transfer_params" not in c.sent_to_d()
            assert c.proxy.counters.prefills_skipped == 1

    async def test_servers_are_used_in_turn(self) -> None:
        async with cluster(prefill=2, decode=3) as c:
            for _ in range(6):
                await c.post({"prompt": "hello"})
            assert [len(server.seen) for server in c.prefill] == [3, 3]
            assert [len(server.seen) for server in c.decode] == [2, 2, 2]

    async def test_many_requests_at_once_stay_apart(self) -> None:
        async with cluster() as c:
            answers = await asyncio.gather(*(c.post({"prompt": f"p{i}"}) for i in range(64)))
            assert [status for status, _, _ in answers] == [200] * 64
            for server in (c.prefill[0], c.decode[0]):
                assert sorted(s.body["prompt"] for s in server.seen) == sorted(
                    f"p{i}" for i in range(64)
                )

    async def test_body_larger_than_aiohttps_default_is_taken(self) -> None:
        async with cluster() as c:
            status, _, _ = await c.post({"prompt": "x" * (2 << 20)})
            assert status == 200


class TestHeaders:
    async def test_one_request_id_on_both_legs_and_in_the_answer(self) -> None:
        async with cluster() as c:
            _, _, headers = await c.post({"prompt": "hello"})
            ids = {s.seen[0].headers["X-Request-Id"] for s in (c.prefill[0], c.decode[0])}
            assert ids == {headers["X-Request-Id"]}

    async def test_clients_request_id_is_kept(self) -> None:
        async with cluster() as c:
            _, _, headers = await c.post({"prompt": "hello"}, X_Request_Id="abc-1")
            assert headers["X-Request-Id"] == "abc-1"
            assert c.prefill[0].seen[0].headers["X-Request-Id"] == "abc-1"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a;b", "é"])
    async def test_unusable_request_id_is_replaced(self, given: str) -> None:
        async with cluster() as c:
            _, _, headers = await c.post({"prompt": "hello"}, X_Request_Id=given)
            assert headers["X-Request-Id"] != given
            assert len(headers["X-Request-Id"]) == 36

    async def test_authorization_is_passed_to_both_servers(self) -> None:
        async with cluster() as c:
            await c.post({"prompt": "hello"}, Authorization="Bearer key")
            for server in (c.prefill[0], c.decode[0]):
                assert server.seen[0].headers["Authorization"] == "Bearer key"


class TestStream:
    async def test_stream_is_passed_through_unchanged(self) -> None:
        async with cluster() as c:
            body = {"prompt": "hello", "stream": True}
            async with c.client.post(c.url + "/v1/completions", json=body) as answer:
                assert answer.content_type == "text/event-stream"
                assert await answer.read() == b"".join(PIECES)
            assert c.sent_to_d()["stream"] is True

    async def test_first_piece_arrives_before_the_last_is_made(self) -> None:
        async with cluster() as c:
            gate = asyncio.Event()

            async def slow(request: web.Request, body: Body) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                await response.write(PIECES[0])
                await gate.wait()
                await response.write(PIECES[2])
                return response

            c.decode[0].behaviour = slow
            body = {"prompt": "hello", "stream": True}
            async with c.client.post(c.url + "/v1/completions", json=body) as answer:
                assert await answer.content.readany() == PIECES[0]
                gate.set()
                assert await answer.content.read() == PIECES[2]


class TestClientDisconnect:
    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_client_that_leaves_ends_the_running_leg(
        self, stage: str, stream: bool
    ) -> None:
        async with cluster() as c:
            server = (c.prefill if stage == "prefill" else c.decode)[0]
            server.behaviour = hang
            task = asyncio.create_task(c.post({"prompt": "hello", "stream": stream}))
            async with asyncio.timeout(10):
                while not server.seen:
                    await asyncio.sleep(0.01)
                task.cancel()
                await server.cancelled.wait()
                while not c.proxy.counters.client_disconnects:
                    await asyncio.sleep(0.01)
            assert len(c.decode[0].seen) == (stage == "decode")

    async def test_a_client_that_leaves_mid_stream_ends_decode(self) -> None:
        async with cluster() as c:

            async def endless(request: web.Request, body: Body) -> web.StreamResponse:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
                while True:
                    await response.write(PIECES[0])
                    await asyncio.sleep(0.01)

            c.decode[0].behaviour = endless
            async with asyncio.timeout(10):
                body = {"prompt": "hello", "stream": True}
                async with c.client.post(c.url + "/v1/completions", json=body) as answer:
                    await answer.content.readany()
                    answer.close()
                await c.decode[0].cancelled.wait()
                while not c.proxy.counters.client_disconnects:
                    await asyncio.sleep(0.01)
            assert c.proxy.counters.errors == {}


class TestOtherPaths:
    async def test_models_come_from_a_decode_server(self) -> None:
        async with cluster() as c, c.client.get(c.url + "/v1/models") as answer:
            assert (await answer.json())["data"][0]["served_by"] == c.decode[0].url

    async def test_models_ask_the_next_server_when_one_is_down(self) -> None:
        async with cluster(decode=2) as c:
            await c.decode[0].stop()
            for _ in range(2):
                async with c.client.get(c.url + "/v1/models") as answer:
                    assert (await answer.json())["data"][0]["served_by"] == c.decode[1].url

    @pytest.mark.parametrize(
        ("stopped", "status", "word"),
        [([], 200, "ok"), ([0], 200, "degraded"), ([0, 1], 503, "down")],
    )
    async def test_health_names_each_server(
        self, stopped: list[int], status: int, word: str
    ) -> None:
        async with cluster(prefill=2) as c:
            for index in stopped:
                await c.prefill[index].stop()
            async with c.client.get(c.url + "/health") as answer:
                report: Body = await answer.json()
                assert (answer.status, report["status"]) == (status, word)
            healthy = [server["healthy"] for server in report["prefill"]]
            assert healthy == [index not in stopped for index in range(2)]
            assert report["decode"][0] == {
                "url": c.decode[0].url,
                "healthy": True,
                "detail": "status 200",
            }
            assert report["counters"]["requests"] == 0
