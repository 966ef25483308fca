"""A server that was asked to stop: what it still serves, for how long, and what its peers hear."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.builders import make_fingerprint, make_ticket
from fakes.clock import FakeClock, wait_for
from fakes.p_scheduler import HOST, FakePScheduler
from fakes.prefiller import PROMPT
from fakes.requests import make_request
from fakes.scheduler_side import make_side

from vllm_llmdd_connector.control.client import ControlClient
from vllm_llmdd_connector.control.messages import Drop
from vllm_llmdd_connector.deadlines import Deadlines
from vllm_llmdd_connector.scheduler import scheduler as scheduler_module
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector
from vllm_llmdd_connector.scheduler.shutdown import ShutdownNotice

TIMEOUT_S = 30


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """What the handlers heard that vLLM sets before connectors see a request."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, frame: heard.append(number))
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def ask_to_stop(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


class TestNotice:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_time_of_the_first_signal_is_noted_and_every_one_handed_on(
        self, handled: list[int], clock: FakeClock, number: signal.Signals
    ) -> None:
        notice = ShutdownNotice(clock)
        notice.arm()
        notice.arm()
        assert notice.asked_s is None
        ask_to_stop(number)
        first_s = clock()
        clock.advance(1.0)
        ask_to_stop(number)
        assert (notice.asked_s, handled) == (first_s, [number, number])

    def test_handlers_that_are_none_stay(self, handled: list[int], clock: FakeClock) -> None:
        """There is no vLLM that would go on after the signal."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ShutdownNotice(clock).arm()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_another_thread_than_the_main_one_notes_nothing(
        self, handled: list[int], clock: FakeClock
    ) -> None:
        """Only the main thread may set handlers: the request must not end with an error."""
        notice = ShutdownNotice(clock)
        thread = threading.Thread(target=notice.arm)
        thread.start()
        thread.join()
        ask_to_stop()
        assert (notice.asked_s, handled) == (None, [signal.SIGTERM])


def hand_over(p: SchedulerConnector) -> None:
    """P computes a prompt for a D that has not come yet."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    request = make_request("r", PROMPT, params, status="FINISHED_STOPPED")
    p.on_new_request(request)
    pool: Any = p._producer._block_pool  # type: ignore[union-attr]
    pool.allocate((1, 2, 3))
    is_delayed, answer = p.request_finished(request, [(1, 2, 3)])
    assert not is_delayed, "vLLM would step without pause until the lease has ended"
    assert answer is not None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The time that P's scheduler side sees."""
    clock = FakeClock()
    monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=clock))
    return clock


class TestDrain:
    def make_p(
        self, monkeypatch: pytest.MonkeyPatch, shutdown_timeout: int = TIMEOUT_S
    ) -> SchedulerConnector:
        return make_side("kv_producer", monkeypatch, shutdown_timeout, lease_s=20)

    def test_leases_alone_keep_no_engine_busy(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int]
    ) -> None:
        p = self.make_p(monkeypatch)
        hand_over(p)
        assert not p.has_pending_work()
        p.shutdown()

    def test_stopping_p_serves_until_its_leases_have_ended(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int], now: FakeClock
    ) -> None:
        p = self.make_p(monkeypatch)
        hand_over(p)
        ask_to_stop()
        assert p.has_pending_work()
        now.advance(20)
        assert p.has_pending_work(), "the step that gives the blocks back is still to come"
        p.reset_cache()
        assert not p.has_pending_work()
        p.shutdown()

    def test_but_not_longer_than_vllm_lets_it(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int], now: FakeClock
    ) -> None:
        p = self.make_p(monkeypatch, shutdown_timeout=12)
        hand_over(p)
        ask_to_stop()
        now.advance(6.9)
        assert p.has_pending_work()
        now.advance(0.2)
        assert not p.has_pending_work()
        p.shutdown()

    def test_p_with_nothing_handed_over_stops_at_once(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int]
    ) -> None:
        p = self.make_p(monkeypatch)
        p.on_new_request(make_request("r", PROMPT, None))
        ask_to_stop()
        assert not p.has_pending_work()
        p.shutdown()

    def test_without_the_option_no_handler_is_touched(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int]
    ) -> None:
        before = signal.getsignal(signal.SIGTERM)
        p = self.make_p(monkeypatch, shutdown_timeout=0)
        hand_over(p)
        assert signal.getsignal(signal.SIGTERM) is before
        ask_to_stop()
        assert not p.has_pending_work()
        p.shutdown()

    def test_a_d_has_no_work_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch, handled: list[int]
    ) -> None:
        """vLLM itself counts its requests, also those that wait for a P."""
        d = make_side("kv_consumer", monkeypatch, TIMEOUT_S)
        d.on_new_request(make_request("r", PROMPT, None))
        ask_to_stop()
        assert not d.has_pending_work()
        d.shutdown()


def test_what_a_stopping_d_does_not_need_any_more_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drops of aborted requests were lost with the thread that was to send them."""
    p = FakePScheduler()
    client = ControlClient(
        make_fingerprint(), time.monotonic, lambda number: None, True, Deadlines()
    )
    ticket = make_ticket(host=HOST, port=p.port)
    client.claim(1, ticket, time.monotonic() + 60)
    wait_for(client.take_outcomes, "the grant")
    for claim_id in range(1, 101):
        client.drop(claim_id, ticket, time.monotonic() + 60)
    client.close()
    wait_for(lambda: len(p.of_type(Drop)) == 100, "the drops")
    p.close()
