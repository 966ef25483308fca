"""What the connector's parts record, and that they are left alone while tracing is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fakes.fake_datadist import FakeDataDist
from fakes.prefiller import make_output
from fakes.rank import Rank
from fakes.requests import make_request

from vllm_llmdd_connector.metadata import PrefillChunk, StepMessage
from vllm_llmdd_connector.scheduler.request_trace import ConsumerTrace, ProducerTrace
from vllm_llmdd_connector.trace.reader import Event, TraceFile, read_file
from vllm_llmdd_connector.worker.step_trace import StepTrace

CHUNK = PrefillChunk("t", 1, 16, ((1,),), 16)


class Recorded:
    """A ``Trace`` that keeps its events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, name: str, at_ns: int | None = None, **args: Any) -> None:
        self.events.append(Event(name, at_ns or 0, None, args))

    def span(self, name: str, begin_ns: int, end_ns: int, **args: Any) -> None:
        self.events.append(Event(name, begin_ns, end_ns, args))

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.events]


@pytest.fixture
def trace() -> Recorded:
    return Recorded()


class TestSteps:
    def test_layers_lie_within_their_step(self, trace: Recorded) -> None:
        steps = StepTrace(trace)
        steps.begin([CHUNK])
        for layer in "ab":
            steps.layer_computed(layer)
        assert trace.events == []
        steps.end()
        step, a, b = trace.events
        assert (step.name, a.args, b.args) == (
            "step",
            {"step": 1, "layer": "a"},
            {"step": 1, "layer": "b"},
        )
        assert step.args["chunks"] == [
            {"transfer": "t", "production": 1, "num_tokens": 16, "end_token": 16}
        ]
        assert step.end_ns is not None
        assert step.at_ns <= a.at_ns <= b.at_ns <= step.end_ns

    def test_first_hook_of_a_layer_is_recorded(self, trace: Recorded) -> None:
        """vLLM-Ascend has two, and the layer may be sent from the first one on."""
        steps = StepTrace(trace)
        steps.begin([CHUNK])
        for layer in "aab":
            steps.layer_computed(layer)
        steps.end()
        assert [event.args.get("layer") for event in trace.events[1:]] == ["a", "b"]

    def test_layers_of_other_steps_are_not_recorded(self, trace: Recorded) -> None:
        steps = StepTrace(trace)
        steps.layer_computed("a")
        steps.end()
        assert trace.events == []

    def test_step_that_never_ended_ends_with_the_next(self, trace: Recorded) -> None:
        steps = StepTrace(trace)
        steps.begin([CHUNK])
        steps.layer_computed("a")
        steps.begin([CHUNK])
        steps.end()
        assert trace.names == ["step", "computed", "step"]


class TestProducer:
    def make(self, trace: Any) -> ProducerTrace:
        return ProducerTrace(trace, (16,), lambda ids: ids)

    def test_prompt_of_a_pull_is_followed_under_p_s_request_id(self, trace: Recorded) -> None:
        producer = self.make(trace)
        request = make_request("r", range(20), {"do_remote_decode": True})
        producer.on_new_request(request)
        step = StepMessage()
        producer.fill(step, make_output(new={"r": ([[4, 5]], 0)}, num_scheduled={"r": 20}))
        assert [(c.transfer_id, c.end_token) for c in step.traced] == [("r", 20)]
        assert step.chunks == []
        assert not step.is_empty
        producer.request_finished(request, True)
        assert trace.names == ["prompt", "prefilled"]
        assert trace.events[1].args == {"transfer": "r", "request": "r", "handed_over": True}

    def test_prompt_of_a_push_is_named_by_its_transfer_and_followed_elsewhere(
        self, trace: Recorded
    ) -> None:
        producer = self.make(trace)
        params = {"do_remote_decode": True, "transfer_id": "t"}
        producer.on_new_request(make_request("r", range(20), params))
        step = StepMessage()
        producer.fill(step, make_output(new={"r": ([[4, 5]], 0)}, num_scheduled={"r": 20}))
        assert step.is_empty
        assert trace.events[0].args == {"transfer": "t", "request": "r", "num_tokens": 20}

    def test_other_requests_are_nothing_to_it(self, trace: Recorded) -> None:
        producer = self.make(trace)
        for params in (None, {}, {"do_remote_prefill": True}):
            request = make_request("r", range(20), params)
            producer.on_new_request(request)
            producer.request_finished(request, False)
        assert trace.events == []


class TestConsumer:
    def make(self, trace: Any) -> ConsumerTrace:
        return ConsumerTrace(trace, {"r": "t"}.get)

    def test_from_admission_to_the_first_decode_step(self, trace: Recorded) -> None:
        consumer = self.make(trace)
        request = make_request("r", range(20))
        consumer.on_new_request(request)
        consumer.on_allocated(request, 19)
        consumer.fill(make_output(num_scheduled={"other": 1}))
        for _ in range(2):
            consumer.fill(make_output(num_scheduled={"r": 1}))
        assert trace.names == ["admitted", "allocated", "decode"]
        assert all(event.args["transfer"] == "t" for event in trace.events)

    def test_request_that_needs_nothing_remote_has_no_decode_step_here(
        self, trace: Recorded
    ) -> None:
        consumer = self.make(trace)
        request = make_request("r", range(20))
        consumer.on_allocated(request, 0)
        consumer.fill(make_output(num_scheduled={"r": 1}))
        assert trace.events == []

    def test_finished_request_is_forgotten(self, trace: Recorded) -> None:
        consumer = self.make(trace)
        request = make_request("r", range(20))
        consumer.on_allocated(request, 19)
        consumer.request_finished(request)
        consumer.fill(make_output(num_scheduled={"r": 1}))
        assert trace.names == ["allocated"]


class TestWorker:
    def test_off_leaves_the_layer_hook_as_it_is(self, datadist: FakeDataDist) -> None:
        rank = Rank("kv_producer", 0)
        try:
            assert "layer_computed" not in vars(rank.worker)
        finally:
            rank.worker.shutdown()

    def test_steps_go_to_a_file_of_the_rank(self, datadist: FakeDataDist, tmp_path: Path) -> None:
        rank = Rank("kv_producer", 0, trace_dir=str(tmp_path))
        rank.step(traced=[CHUNK])
        for layer in "ab":
            rank.worker.layer_computed(layer)
        rank.worker.forward_ended()
        rank.step()
        rank.worker.layer_computed("a")
        rank.worker.forward_ended()
        rank.worker.shutdown()
        file = self.only_file(tmp_path)
        assert file.process == "rank 0"
        assert file.facts["role"] == "kv_producer"
        regions = [cache["regions"] for cache in file.facts["caches"]]
        assert regions == [[["a", "a"], ["b", "b"]]]
        assert [event.name for event in file.events] == ["step", "computed", "computed"]

    @staticmethod
    def only_file(folder: Path) -> TraceFile:
        (path,) = folder.iterdir()
        return read_file(path)
