"""A worker that gets no thread any more: the request that needed one fails alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fakes.clock import FakeClock, wait_for
from fakes.puller import make_job
from fakes.push_side import P, PushSide
from fakes.rank import Rank

from vllm_llmdd_connector.control.knock import Knocker
from vllm_llmdd_connector.control.messages import Done, Failed, Knock, WorkerEndpoint
from vllm_llmdd_connector.control.metaserver import MetaserverClient
from vllm_llmdd_connector.deadlines import Deadlines


@contextmanager
def no_thread() -> Iterator[None]:
    """As Python says it under a limit of processes or memory."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        yield


class TestP:
    def test_push_fails_alone(self, clock: FakeClock) -> None:
        """It once ended the engine, from inside vLLM's step."""
        side = PushSide(clock)
        side.reserve(1)
        with no_thread():
            side.step()
        [failed] = side.answers
        assert isinstance(failed, Failed)
        assert "no thread to send with: can't start new thread" in failed.reason
        assert side.tasks == []
        side.reserve(2)
        [task] = side.tasks
        task.end()
        assert isinstance(side.wait_answers(2)[1], Done)
        side.close()

    def test_d_of_a_metaserver_is_not_told(self) -> None:
        failures: list[str] = []
        knocker = Knocker()
        message = Knock(transfer_id="t", host="127.0.0.1", port=1)
        with no_thread():
            knocker.knock(("127.0.0.1", 1), message, lambda: failures.append("first"))
        assert failures == ["first"]
        knocker.knock(("127.0.0.1", 1), message, lambda: failures.append("second"))
        wait_for(lambda: failures == ["first", "second"], "the refusal of the port")
        knocker.close()


class TestD:
    def test_metaserver_is_not_asked(self) -> None:
        reasons: list[str] = []
        client = MetaserverClient(Deadlines())
        url = "http://127.0.0.1:1/"
        with no_thread():
            client.post("first", url, {}, reasons.append)
        assert reasons == [f"{url} cannot be asked: can't start new thread"]
        client.post("second", url, {}, reasons.append)
        wait_for(lambda: len(reasons) == 2, "the refusal of the port")
        assert "can't start new thread" not in reasons[1]
        client.close()

    def test_request_fails_alone(self) -> None:
        """It once ended the engine, from inside vLLM's step; now the next one is served."""
        rank = Rank("kv_consumer", 0)
        endpoint = WorkerEndpoint(
            cluster_id=P, host="127.0.0.1", engine_port=1, link_secret="", control_port=1
        )
        first, second = (make_job(number, workers=(endpoint,)) for number in (1, 2))
        with no_thread():
            rank.step(jobs=[first])
        assert rank.report.failed == {
            first.request_id: "queue: nothing to serve it with: can't start new thread"
        }
        rank.step(jobs=[second])
        rank.worker.shutdown()
        rank.step()
        assert rank.failed == {first.request_id, second.request_id}
