"""The proxy sends both legs at once: what each is told, and what one's end does to the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from fake_vllm import (
    PARAMS,
    PIECES,
    Behaviour,
    Body,
    Cluster,
    answer_with,
    cluster,
    decode_answer,
    drop_connection,
    hang,
    prefill_answer,
)
from flows import Flow, FlowOptions
from legs import Limits
from proxy import main

CONTROL = ("10.1.2.3", 7100)


@asynccontextmanager
async def pushing(prefill: int = 1, decode: int = 1, **more: Any) -> AsyncIterator[Cluster]:
    """A proxy that knows the control channel of each P."""
    options = FlowOptions(prefill_controls=[CONTROL] * prefill)
    async with cluster(prefill, decode, options=options, **more) as c:
        yield c


def waiting_for(gate: asyncio.Event, then: Behaviour) -> Behaviour:
    async def behave(request: web.Request, body: Body) -> web.StreamResponse:
        await gate.wait()
        return await then(request, body)

    return behave


class TestLegs:
    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    async def test_one_random_transfer_id_in_both_and_ps_address_in_ds(self, path: str) -> None:
        async with pushing() as c:
            body = {"prompt": "hello", "max_tokens": 5}
            seen = set()
            for _ in range(2):
                status, answer, _ = await c.post(body, path)
                assert (status, answer["choices"][0]["text"]) == (200, "out")
                to_p, to_d = c.sent_to_p()["kv_transfer_params"], c.sent_to_d()
                transfer_id = to_p["transfer_id"]
                assert to_p["do_remote_decode"] is True
                assert to_p["remote_host"] is None
                assert to_d == {
                    **body,
                    "kv_transfer_params": {
                        "do_remote_prefill": True,
                        "do_remote_decode": False,
                        "remote_host": CONTROL[0],
                        "remote_port": CONTROL[1],
                        "transfer_id": transfer_id,
                    },
                }
                assert int(transfer_id, 16) >= 0
                assert len(transfer_id) == 32
                seen.add(transfer_id)
            assert len(seen) == 2

    async def test_neither_leg_waits_for_the_other(self) -> None:
        async with pushing() as c:
            prefilled, decoded = asyncio.Event(), asyncio.Event()

            async def prefill(request: web.Request, body: Body) -> web.StreamResponse:
                prefilled.set()
                await decoded.wait()
                return await prefill_answer(request, body)

            async def decode(request: web.Request, body: Body) -> web.StreamResponse:
                decoded.set()
                await prefilled.wait()
                return await decode_answer(request, body)

            c.prefill[0].behaviour, c.decode[0].behaviour = prefill, decode
            async with asyncio.timeout(10):
                status, _, _ = await c.post({"prompt": "hello"})
            assert status == 200
            assert c.proxy.counters.pushes == 1

    async def test_each_p_goes_with_its_own_address(self) -> None:
        controls = [("10.0.0.1", 1), ("10.0.0.2", 2)]
        options = FlowOptions(prefill_controls=controls)
        async with cluster(prefill=2, options=options) as c:
            for index in (0, 1):
                await c.post({"prompt": f"p{index}"})
                await c.eventually(lambda i=index: c.prefill[i].seen)
                params = c.sent_to_d()["kv_transfer_params"]
                assert (params["remote_host"], params["remote_port"]) == controls[index]
                assert c.sent_to_p(index)["prompt"] == f"p{index}"

    async def test_clients_own_params_reach_no_server(self) -> None:
        async with pushing() as c:
            evil = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "transfer_id": "x"}
            await c.post({"prompt": "hello", "kv_transfer_params": evil})
            assert c.sent_to_d()["kv_transfer_params"]["remote_host"] == CONTROL[0]
            assert c.sent_to_p()["kv_transfer_params"]["transfer_id"] != "x"


class TestChoice:
    async def test_address_is_learnt_from_the_first_answer_which_goes_by_pull(self) -> None:
        async with cluster() as c:
            await c.post({"prompt": "first"})
            assert c.sent_to_d()["kv_transfer_params"] == PARAMS
            await c.post({"prompt": "second"})
            params = c.sent_to_d()["kv_transfer_params"]
            assert (params["remote_host"], params["remote_port"]) == ("127.0.0.1", 5555)
            assert params["transfer_id"] == c.sent_to_p()["kv_transfer_params"]["transfer_id"]
            assert c.proxy.counters.pushes == 1

    async def test_address_is_learnt_for_each_p(self) -> None:
        async with cluster(prefill=2) as c:
            for _ in range(4):
                await c.post({"prompt": "hello"})
            assert c.proxy.counters.pushes == 2

    async def test_another_address_in_an_answer_replaces_a_learnt_one(self) -> None:
        """A restarted server has another port, which its first answer names."""
        async with cluster() as c:
            await c.post({"prompt": "before"})
            again = {"kv_transfer_params": {**PARAMS, "remote_port": 6666.0}}
            c.prefill[0].behaviour = answer_with(200, again)
            await c.post({"prompt": "at the old port"})
            await c.eventually(lambda: c.proxy.counters.prefills == 2)
            await c.post({"prompt": "at the new one"})
            assert c.sent_to_d()["kv_transfer_params"]["remote_port"] == 6666

    async def test_a_given_address_stays(self) -> None:
        async with pushing() as c:
            for _ in range(2):
                await c.post({"prompt": "hello"})
                await c.eventually(lambda: c.proxy.counters.prefills == c.proxy.counters.pushes)
            assert c.sent_to_d()["kv_transfer_params"]["remote_port"] == CONTROL[1]

    @pytest.mark.parametrize(
        "odd",
        [{"remote_port": None}, {"remote_port": 0}, {"remote_port": True}, {"remote_host": 7}],
    )
    async def test_an_answer_without_a_usable_address_keeps_pulling(self, odd: Body) -> None:
        async with cluster() as c:
            c.prefill[0].behaviour = answer_with(200, {"kv_transfer_params": {**PARAMS, **odd}})
            for _ in range(2):
                await c.post({"prompt": "hello"})
            assert c.sent_to_d()["kv_transfer_params"] == {**PARAMS, **odd}
            assert c.proxy.counters.pushes == 0

    async def test_pull_is_kept_where_the_operator_says_so(self) -> None:
        async with cluster(options=FlowOptions(Flow.PULL, [CONTROL])) as c:
            for _ in range(2):
                await c.post({"prompt": "hello"})
                assert c.sent_to_d()["kv_transfer_params"] == PARAMS
            assert c.proxy.counters.pushes == 0

    @pytest.mark.parametrize("body", [{"n": 2}, {"prompt": ["a", "b"]}])
    async def test_bodies_of_several_requests_go_by_pull(self, body: Body) -> None:
        async with pushing() as c:
            await c.post({"prompt": "hello", **body})
            assert c.sent_to_d()["kv_transfer_params"] == PARAMS

    async def test_prompt_logprobs_go_to_d_alone(self) -> None:
        async with pushing() as c:
            await c.post({"prompt": "hello", "prompt_logprobs": 1})
            assert c.prefill[0].seen == []
            assert "kv_transfer_params" not in c.sent_to_d()
            assert c.proxy.counters.prefills_skipped == 1


class TestPrefillFails:
    @pytest.mark.parametrize(
        "behaviour", [drop_connection, answer_with(500, "died"), answer_with(400, "too long")]
    )
    @pytest.mark.parametrize("stream", [False, True])
    async def test_ds_answer_decides_and_the_failure_is_counted(
        self, behaviour: Behaviour, stream: bool
    ) -> None:
        async with pushing() as c:
            failed = asyncio.Event()
            c.prefill[0].behaviour = behaviour
            c.decode[0].behaviour = waiting_for(failed, decode_answer)
            body = {"prompt": "hello", "stream": stream}
            async with asyncio.TaskGroup() as group:
                task = group.create_task(self._text(c, body))
                await c.eventually(lambda: c.proxy.counters.prefills_failed == 1)
                failed.set()
            assert task.result() == (b"".join(PIECES).decode() if stream else "out")
            assert c.proxy.counters.errors == {}

    async def test_a_p_that_is_down_costs_the_client_nothing_and_rests(self) -> None:
        async with pushing(prefill=2) as c:
            await c.prefill[0].stop()
            status, _, _ = await c.post({"prompt": "hello"})
            assert status == 200
            await c.eventually(lambda: c.proxy.counters.prefills_failed == 1)
            for _ in range(3):
                assert (await c.post({"prompt": "hello"}))[0] == 200
            await c.eventually(lambda: len(c.prefill[1].seen) == 3)

    async def test_a_p_that_is_too_slow_is_ended_by_its_own_limit(self) -> None:
        async with pushing(limits=Limits(prefill_s=0.1)) as c:
            late = asyncio.Event()
            c.prefill[0].behaviour = hang
            c.decode[0].behaviour = waiting_for(late, decode_answer)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(c.post({"prompt": "hello"}))
                await c.prefill[0].cancelled.wait()
                late.set()
            assert task.result()[0] == 200

    @staticmethod
    async def _text(c: Cluster, body: Body) -> str:
        async with c.client.post(c.url + "/v1/completions", json=body) as answer:
            assert answer.status == 200
            if answer.content_type == "text/event-stream":
                return (await answer.read()).decode()
            return str((await answer.json())["choices"][0]["text"])


class TestDecodeEnds:
    @pytest.mark.parametrize(
        ("behaviour", "status"),
        [(drop_connection, 502), (answer_with(500, "died"), 502), (answer_with(400, {}), 400)],
    )
    async def test_a_failing_d_ends_the_prefill(self, behaviour: Behaviour, status: int) -> None:
        async with pushing() as c:
            asked = asyncio.Event()

            async def prefill(request: web.Request, body: Body) -> web.StreamResponse:
                asked.set()
                return await hang(request, body)

            c.prefill[0].behaviour = prefill
            c.decode[0].behaviour = waiting_for(asked, behaviour)
            assert (await c.post({"prompt": "hello"}))[0] == status
            async with asyncio.timeout(10):
                await c.prefill[0].cancelled.wait()
            assert c.proxy.counters.prefills_failed == 0

    async def test_next_decode_server_gets_the_same_transfer(self) -> None:
        async with pushing(decode=2) as c:
            await c.decode[0].stop()
            assert (await c.post({"prompt": "hello"}))[0] == 200
            to_p, to_d = c.sent_to_p(), c.sent_to_d(1)
            assert (
                to_d["kv_transfer_params"]["transfer_id"]
                == to_p["kv_transfer_params"]["transfer_id"]
            )

    async def test_all_decode_servers_down_is_503(self) -> None:
        async with pushing() as c:
            c.prefill[0].behaviour = hang
            await c.decode[0].stop()
            status, answer, _ = await c.post({"prompt": "hello"})
            assert (status, answer["error"]["type"]) == (503, "decode_unavailable")

    async def test_client_has_its_answer_before_p_ends_and_p_is_then_ended(self) -> None:
        async with pushing() as c:
            c.prefill[0].behaviour = hang
            assert (await c.post({"prompt": "hello"}))[0] == 200
            async with asyncio.timeout(10):
                await c.prefill[0].cancelled.wait()

    async def test_a_p_that_answers_a_little_later_is_not_ended(self) -> None:
        async with pushing() as c:
            answered = asyncio.Event()
            c.prefill[0].behaviour = waiting_for(answered, prefill_answer)
            assert (await c.post({"prompt": "hello"}))[0] == 200
            answered.set()
            await c.eventually(lambda: c.proxy.counters.prefills == 1)
            assert not c.prefill[0].cancelled.is_set()


class TestClientDisconnect:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_both_legs_are_ended(self, stream: bool) -> None:
        async with pushing() as c:
            c.prefill[0].behaviour = c.decode[0].behaviour = hang
            task = asyncio.create_task(c.post({"prompt": "hello", "stream": stream}))
            await c.eventually(lambda: c.prefill[0].seen and c.decode[0].seen)
            task.cancel()
            async with asyncio.timeout(10):
                await c.prefill[0].cancelled.wait()
                await c.decode[0].cancelled.wait()
            await c.eventually(lambda: c.proxy.counters.client_disconnects == 1)
            assert c.proxy.counters.prefills_failed == 0


class TestCommandLine:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["--prefill-control", "10.0.0.1:1", "--prefill", "http://b"], "one per --prefill"),
            (["--prefill-control", "p.example:1"], "not IPV4:PORT"),
            (["--prefill-control", "10.0.0.1"], "not IPV4:PORT"),
            (["--prefill-control", "10.0.0.1:70000"], "not in [1, 65535]"),
            (["--flow", "decode-first", "--host", "0.0.0.0"], "--metaserver-url"),
            (["--flow", "sideways"], "invalid choice"),
        ],
    )
    def test_what_cannot_work_is_one_sentence(
        self, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit):
            main(["--prefill", "http://a", "--decode", "http://d", *words])
        assert told in capsys.readouterr().err
