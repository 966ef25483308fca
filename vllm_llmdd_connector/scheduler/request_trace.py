"""The scheduler side with ``trace_dir``: requests from their arrival to D's first decode step.

Exists only while tracing is on. Scheduling thread.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.errors import RemoteProtocolError
from vllm_llmdd_connector.metadata import StepMessage
from vllm_llmdd_connector.params import transfer_id_of, wants_remote_decode
from vllm_llmdd_connector.scheduler.prefill_steps import PrefillSteps
from vllm_llmdd_connector.trace.recorder import Recorder

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

BlockIds = Sequence[Sequence[int]]


class ProducerTrace:
    """P's requests that are to be handed over.

    Follows those without a transfer id, too, which the workers are told of for the picture only;
    D knows them by P's request id.
    """

    def __init__(
        self,
        trace: Recorder,
        block_sizes: Sequence[int],
        select_groups: Callable[[BlockIds], BlockIds],
    ) -> None:
        self._trace = trace
        self._plain = PrefillSteps(block_sizes, select_groups)
        self._productions = count(1)

    def on_new_request(self, request: "Request") -> None:
        names = self._names(request)
        if names is None:
            return
        self._trace.event("prompt", **names, num_tokens=request.num_prompt_tokens)
        if names["transfer"] == request.request_id:
            self._plain.follow(request.request_id, request.request_id, request.num_prompt_tokens)

    def fill(self, step: StepMessage, output: "SchedulerOutput") -> None:
        """Tell the workers which prompts of D's pulls this step computes."""
        prefills = self._plain.observe(output, lambda: next(self._productions))
        if prefills is not None:
            step.traced = prefills.chunks

    def request_finished(self, request: "Request", is_handed_over: bool) -> None:
        self._plain.forget(request.request_id)
        names = self._names(request)
        if names is not None:
            self._trace.event("prefilled", **names, handed_over=is_handed_over)

    @staticmethod
    def _names(request: "Request") -> dict[str, Any] | None:
        params = request.kv_transfer_params
        if not wants_remote_decode(params):
            return None
        assert params is not None
        try:
            transfer = transfer_id_of(params) or request.request_id
        except RemoteProtocolError:
            return None
        return {"transfer": transfer, "request": request.request_id}


class ConsumerTrace:
    """D's requests that come with a ticket."""

    def __init__(self, trace: Recorder, transfer_of: Callable[[str], str | None]) -> None:
        self._trace = trace
        self._transfer_of = transfer_of
        self._undecoded: dict[str, str] = {}

    def on_new_request(self, request: "Request") -> None:
        transfer = self._transfer_of(request.request_id)
        if transfer is not None:
            self._trace.event(
                "admitted",
                transfer=transfer,
                request=request.request_id,
                num_tokens=request.num_prompt_tokens,
            )

    def on_allocated(self, request: "Request", num_external_tokens: int) -> None:
        """Only for a request whose remote blocks are decided by this allocation."""
        transfer = self._transfer_of(request.request_id)
        if transfer is None or num_external_tokens <= 0:
            return
        self._undecoded[request.request_id] = transfer
        self._trace.event(
            "allocated",
            transfer=transfer,
            request=request.request_id,
            num_tokens=num_external_tokens,
        )

    def fill(self, output: "SchedulerOutput") -> None:
        """vLLM schedules a request first when its blocks are there: that is its first decode
        step."""
        for request_id in list(self._undecoded):
            if request_id in output.num_scheduled_tokens:
                transfer = self._undecoded.pop(request_id)
                self._trace.event("decode", transfer=transfer, request=request_id)

    def request_finished(self, request: "Request") -> None:
        self._undecoded.pop(request.request_id, None)
