"""vLLM's executor interface over ranks that live in this process."""

from __future__ import annotations

import pickle
from collections import deque
from concurrent.futures import Future
from typing import Any

from engine_spec import EngineSpec
from fake_worker import FakeWorker, StepResult
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput


class StepFuture(Future[ModelRunnerOutput]):
    """Output of a step that is computed when it is asked for, after the steps before it."""

    def __init__(self, executor: ScriptedExecutor) -> None:
        super().__init__()
        self._executor = executor

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._executor.compute_up_to(self)
        return super().result(timeout)


class ScriptedExecutor(Executor):
    """Runs the ranks one after the other; use a subclass made by ``for_spec``."""

    spec: EngineSpec

    @classmethod
    def for_spec(cls, spec: EngineSpec) -> type[ScriptedExecutor]:
        return type("ScriptedExecutor", (cls,), {"spec": spec})

    def _init_executor(self) -> None:
        self.workers: list[FakeWorker] = []
        for rank in range(self.spec.tp_size):
            config = pickle.loads(pickle.dumps(self.vllm_config))
            config.parallel_config.rank = rank
            self.workers.append(FakeWorker(self.spec, config, rank))
        self._launched: StepFuture | None = None
        self._queue: deque[tuple[StepFuture, list[StepResult]]] = deque()

    def collective_rpc(  # type: ignore[no-untyped-def]
        self, method, timeout=None, args=(), kwargs=None, non_block=False
    ) -> list[Any]:
        results = []
        for worker in self.workers:
            with worker.current():
                results.append(getattr(worker, method)(*args, **(kwargs or {})))
        return results

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def check_health(self) -> None:
        """There is no process that could die."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Launch a step; without tokens this is also its output, otherwise the answer is None."""
        results = self.collective_rpc("launch", args=(scheduler_output,))
        step = StepFuture(self)
        self._queue.append((step, results))
        if not self.spec.device_lag:
            self.compute_up_to(step)
        if not scheduler_output.total_num_scheduled_tokens:
            return step if non_block else step.result()
        self._launched = step
        if not non_block:
            return None
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        step, self._launched = self._launched, None
        assert step is not None
        return step if non_block else step.result()

    def compute_up_to(self, step: StepFuture) -> None:
        """Compute the launched steps in order until this one is done."""
        while not step.done():
            future, results = self._queue.popleft()
            future.set_result(self._finish(results))

    def _finish(self, results: list[StepResult]) -> ModelRunnerOutput:
        digests: dict[str, int] = {}
        for result in results:
            for req_id, digest in result.compute().items():
                digests[req_id] = digests.get(req_id, 0) + digest
        model = self.spec.model
        tokens = {req_id: model.token(digest) for req_id, digest in digests.items()}
        for worker in self.workers:
            for req_id, token in tokens.items():
                worker.states.append(req_id, token)
        outputs = [
            ModelRunnerOutput(
                req_ids=result.req_ids,
                req_id_to_index={req_id: i for i, req_id in enumerate(result.req_ids)},
                sampled_token_ids=[
                    [tokens[req_id]] if req_id in tokens else [] for req_id in result.req_ids
                ],
                kv_connector_output=result.connector_output,
            )
            for result in results
        ]
        if self.kv_output_aggregator is not None and len(outputs) > 1:
            return self.kv_output_aggregator.aggregate(outputs)
        return outputs[0]
