"""P's legs that are made of a D's post: whom P tells, and for whom it holds nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from fakes.clock import wait_for
from fakes.requests import make_request

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.messages import AnyMessage, Knock
from vllm_llmdd_connector.metrics import TransferStats
from vllm_llmdd_connector.params import wants_remote_decode
from vllm_llmdd_connector.scheduler.callers import Callers
from vllm_llmdd_connector.scheduler.handover import HandoverTable

PROMPT = [1, 2, 3]


class StubProducer:
    """Takes requests as ``Producer`` does, as far as their handovers go."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.handovers = HandoverTable(30.0, 5.0, 100)
        self.seen: list[Any] = []

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params
        self.seen.append(params)
        if wants_remote_decode(params):
            with self.lock:
                transfer_id = params["transfer_id"]
                self.handovers.arrive(transfer_id, request.request_id, len(PROMPT), "h", 0.0)


class Prefiller:
    def __init__(self) -> None:
        self.producer = StubProducer()
        self.stats = TransferStats()
        self.callers = Callers(ConnectorConfig(), 7100, self.producer, self.stats)  # type: ignore[arg-type]
        self.heard: list[AnyMessage] = []
        self.d = Server("d", "127.0.0.1", 0, lambda: None)
        self.d.start(lambda message, reply: self.heard.append(message))

    def post(self, transfer_id: str = "t", **more: Any) -> dict[str, Any]:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_host": "127.0.0.1",
            "remote_port": self.d.port,
            "transfer_id": transfer_id,
            **more,
        }

    def admit(self, params: Any, request_id: str = "cmpl-a-0-0123abcd", **more: Any) -> Any:
        request = make_request(request_id, PROMPT, params, **more)
        self.callers.on_new_request(request)
        return request

    def counts(self) -> dict[str, int]:
        stats = self.stats.take()
        return {} if stats is None else stats.data["counts"]


@pytest.fixture
def prefiller() -> Iterator[Prefiller]:
    made = Prefiller()
    yield made
    made.callers.close()
    made.d.close()


def knock(transfer_id: str) -> Knock:
    return Knock(transfer_id=transfer_id, host="127.0.0.1", port=7100)


class TestKnock:
    def test_d_is_told_where_its_prompt_is(self, prefiller: Prefiller) -> None:
        prefiller.admit(prefiller.post())
        wait_for(lambda: prefiller.heard == [knock("t")], "the knock")
        handover = prefiller.producer.handovers.of_request("cmpl-a-0-0123abcd")
        assert handover is not None
        assert not handover.was_dropped

    def test_other_flows_are_handed_on_untouched(self, prefiller: Prefiller) -> None:
        nulls = {"do_remote_decode": True, "remote_host": None, "remote_port": None}
        others: list[Any] = [
            None,
            {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1},
            nulls | {"transfer_id": "t"},
        ]
        for number, params in enumerate(others):
            prefiller.admit(params, f"r{number}")
        assert prefiller.producer.seen == others
        prefiller.admit(prefiller.post("last"), "r9")
        wait_for(lambda: prefiller.heard == [knock("last")], "the only knock")

    def test_a_request_that_is_refused_knocks_nowhere(self, prefiller: Prefiller) -> None:
        prefiller.admit(prefiller.post("refused"), "r1", abort_immediately=True)
        prefiller.admit(prefiller.post("last"), "r2")
        wait_for(lambda: prefiller.heard == [knock("last")], "the only knock")

    def test_nothing_is_held_for_a_d_that_is_not_there(self, prefiller: Prefiller) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        prefiller.admit(prefiller.post(remote_port=port))
        handover = prefiller.producer.handovers.of_request("cmpl-a-0-0123abcd")
        assert handover is not None
        wait_for(lambda: handover.was_dropped, "the handover's end")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"remote_host": "10.0.0.1"},
            {"remote_host": "localhost"},
            {"remote_host": ["127.0.0.1"]},
            {"remote_port": 0},
            {"remote_port": None},
            {"transfer_id": "a\nb"},
        ],
    )
    def test_a_d_that_may_not_be_dialled_gets_nothing(
        self, prefiller: Prefiller, wrong: dict[str, Any]
    ) -> None:
        prefiller.admit(prefiller.post(**wrong))
        (params,) = prefiller.producer.seen
        assert not wants_remote_decode(params)
        assert prefiller.counts() == {"not_handed_over": 1}
        prefiller.admit(prefiller.post("last"), "r2")
        wait_for(lambda: prefiller.heard == [knock("last")], "the only knock")


class TestPromptList:
    def test_each_prompt_has_the_params_of_its_own_d_request(self, prefiller: Prefiller) -> None:
        children = {f"cmpl-a-{number}": prefiller.post(f"t{number}") for number in range(3)}
        params = prefiller.post("t0", batch_kv_transfer_params=children)
        for number in range(3):
            prefiller.admit(dict(params), f"cmpl-a-{number}-0123abcd")
        wait_for(lambda: len(prefiller.heard) == 3, "three knocks")
        assert prefiller.heard == [knock("t0"), knock("t1"), knock("t2")]
        assert [seen["transfer_id"] for seen in prefiller.producer.seen] == ["t0", "t1", "t2"]

    def test_a_prompt_without_params_is_computed_for_nobody(self, prefiller: Prefiller) -> None:
        children = {"cmpl-a-0": prefiller.post()}
        prefiller.admit(prefiller.post(batch_kv_transfer_params=children), "cmpl-a-1-0123abcd")
        (params,) = prefiller.producer.seen
        assert not wants_remote_decode(params)
        assert prefiller.counts() == {"not_handed_over": 1}
