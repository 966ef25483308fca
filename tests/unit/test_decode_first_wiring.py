"""Decode first between two scheduler sides in one process, with their real sockets and HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from fakes.builders import make_fingerprint
from fakes.clock import wait_for
from fakes.http_server import FakeMetaserver, serving
from fakes.requests import make_request
from fakes.scheduler_side import make_side

from vllm_llmdd_connector.control.channel import Dialer
from vllm_llmdd_connector.control.messages import Hello, Knock, raw_fingerprint
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector

PROMPT = list(range(40))
FIRST_CONTACT_S = 20.0


@pytest.fixture
def p(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerConnector]:
    side = make_side("kv_producer", monkeypatch, first_contact_timeout_s=FIRST_CONTACT_S)
    yield side
    side.shutdown()


@pytest.fixture
def d(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerConnector]:
    side = make_side("kv_consumer", monkeypatch, first_contact_timeout_s=FIRST_CONTACT_S)
    yield side
    side.shutdown()


@pytest.fixture
def metaserver() -> Iterator[FakeMetaserver]:
    with serving() as fake:
        yield fake


def ask(d: SchedulerConnector, url: str) -> Any:
    params = {"do_remote_prefill": True, "do_remote_decode": False, "metaserver": url}
    request = make_request("cmpl-a-0-0123abcd", PROMPT, params)
    d.on_new_request(request)
    return request


def test_d_is_invited_by_the_p_that_the_metaserver_chose(
    p: SchedulerConnector, d: SchedulerConnector, metaserver: FakeMetaserver
) -> None:
    """vLLM's hooks of P run on one thread; here it is the metaserver's."""
    metaserver.hold = True
    prefills: list[Any] = []

    def prefill(params: dict[str, Any]) -> None:
        prefills.append(make_request("cmpl-a-0-89abcdef", PROMPT, params))
        p.on_new_request(prefills[-1])

    metaserver.on_post = prefill
    request = ask(d, metaserver.url)

    def is_invited() -> bool:
        if prefills:
            p.get_num_new_matched_tokens(prefills[0], 0)
        return d.get_num_new_matched_tokens(request, 0) == (39, True)

    wait_for(is_invited, "P's invitation")
    assert metaserver.bodies[0]["request_id"] == "cmpl-a-0"
    assert metaserver.bodies[0]["remote_engine_id"] == "engine of kv_consumer"


def test_a_metaserver_that_refuses_ends_ds_wait(
    d: SchedulerConnector, metaserver: FakeMetaserver
) -> None:
    metaserver.status = 502
    request = ask(d, metaserver.url)
    wait_for(lambda: d.get_num_new_matched_tokens(request, 0) == (0, False), "the local prefill")
    stats = d.take_stats()
    assert stats is not None
    assert stats.data["failures"] == {"metaserver": 1}


def test_what_is_not_for_a_d_is_dropped_and_counted(
    d: SchedulerConnector, metaserver: FakeMetaserver
) -> None:
    metaserver.hold = True
    ask(d, metaserver.url)
    wait_for(lambda: metaserver.bodies, "the post")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dialer = Dialer(context, "127.0.0.1", metaserver.bodies[0]["remote_port"])
    hello = Hello(version=1, fingerprint=raw_fingerprint(make_fingerprint()))
    dialer.send([hello, Knock(transfer_id="guessed", host="127.0.0.1", port=1)])
    counted: list[Any] = []

    def is_counted() -> bool:
        stats = d.take_stats()
        counted.extend(stats.data["counts"].items() if stats else ())
        return bool(counted)

    wait_for(is_counted, "the count")
    dialer.close()
    context.term()
    assert counted == [("junk_messages", 1)]


def test_shutdown_ends_every_thread(
    p: SchedulerConnector, d: SchedulerConnector, metaserver: FakeMetaserver
) -> None:
    metaserver.hold = True
    metaserver.on_post = lambda params: p.on_new_request(make_request("r", PROMPT, params))
    ask(d, metaserver.url)
    ours = {"llmdd-knock", "llmdd-metaserver", "llmdd-control-server", "llmdd-control"}
    wait_for(lambda: ours <= {t.name for t in threading.enumerate()}, "all threads")
    for side in (p, d):
        side.shutdown()
        side.shutdown()
    assert not ours & {t.name for t in threading.enumerate()}
