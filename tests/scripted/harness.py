"""Drives vLLM's real engine core, scheduler and connector classes without a model.

``Engine`` builds an ``EngineCore`` whose executor runs ``FakeWorker`` instances in this process.
Both step functions of the core are vLLM's own, so scheduling, aborts, the batch queue and the
treatment of the connector's results are exactly those of the vLLM version that is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import vllm
from engine_blocks import EngineBlocks, Mismatch
from engine_spec import EngineSpec, fixed_hash_seed, vllm_config
from fake_executor import ScriptedExecutor
from kv_reference import KVModel
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

VERSION = tuple(int(part) for part in vllm.__version__.split(".")[:2])
"""Of the imported vLLM, as (major, minor)."""

LOOPBACK = {"connector": "LoopbackConnector", "module_path": "loopback_connector"}
"""``EngineSpec`` fields of the connector that tests the harness."""

PATIENCE_S = 20.0
"""Longest wait for something that another thread does."""

__all__ = [
    "LOOPBACK",
    "VERSION",
    "Engine",
    "EngineSpec",
    "KVModel",
    "Mismatch",
    "Result",
    "run_until",
]


@dataclass
class Result:
    """What the client of a request has got so far."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class Engine(EngineBlocks):
    """One engine: scheduler, connector and workers, stepped by hand.

    ``on_idle`` is called after a step that computed nothing although requests are left; vLLM sleeps
    a millisecond there, and a test with a clock of its own may advance it instead.
    """

    def __init__(self, spec: EngineSpec, directory: Path) -> None:
        self.spec = spec
        self.results: dict[str, Result] = {}
        self.connector_stats: list[Mapping[str, Any]] = []
        self.on_idle: Callable[[], None] = lambda: time.sleep(0.001)
        self.steps = 0
        self.steps_with_tokens = 0
        self._next_id = 0
        with fixed_hash_seed(), _no_process_tuning():
            self.core = EngineCore(
                vllm_config(spec, directory), ScriptedExecutor.for_spec(spec), log_stats=True
            )
        self.scheduler = self.core.scheduler
        self.workers = self.core.model_executor.workers
        self.scheduler.needs_kv_cache_zeroing |= spec.zero_new_blocks
        self.initial_free_blocks = self.free_blocks()

    @property
    def connector(self) -> Any:
        """The scheduler-side connector."""
        return self.scheduler.connector

    def close(self) -> None:
        """Shut the core, the workers and the connectors down."""
        with _no_process_tuning():
            self.core.shutdown()

    # Requests.

    def add_request(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        stop_token_ids: Sequence[int] = (),
        prompt_logprobs: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        abort_immediately: bool = False,
    ) -> str:
        """Hand a request to the core as its frontend does and return the request's id."""
        if request_id is None:
            self._next_id += 1
            request_id = f"req-{self._next_id}"
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0,
            ignore_eos=True,
            stop_token_ids=list(stop_token_ids),
            prompt_logprobs=prompt_logprobs,
            extra_args=None
            if kv_transfer_params is None
            else {"kv_transfer_params": dict(kv_transfer_params)},
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            lora_request=None
            if lora_name is None
            else LoRARequest(lora_name, 1 + abs(hash(lora_name)) % 1000, "/nowhere"),
            cache_salt=cache_salt,
            block_hasher=self.core.request_block_hasher,
            abort_immediately=abort_immediately,
        )
        self.results[request_id] = Result()
        self.core.add_request(request)
        return request_id

    def abort(self, *request_ids: str, during_step: bool = False) -> None:
        """Abort between two steps, or while the next step is executing."""
        if during_step:
            self.core.aborts_queue.put_nowait(list(request_ids))
        else:
            self.core.abort_requests(list(request_ids))

    def request(self, request_id: str) -> Any:
        """vLLM's record of a request that it still knows, else None."""
        return self.scheduler.requests.get(request_id)

    def preempt(self, request_id: str) -> None:
        """Preempt a running request between two steps, as a reset of the prefix cache does.

        ``hold_blocks`` brings about the ordinary kind, in the middle of scheduling.
        """
        request = self.request(request_id)
        self.scheduler.running.remove(request)
        if hasattr(request, "async_tokens_to_discard"):  # vLLM 0.23
            self.scheduler._preempt_request(request, time.monotonic())
            request.async_tokens_to_discard = request.num_output_placeholders
            request.num_output_placeholders = 0
        else:
            self.scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        self.scheduler.prev_step_scheduled_req_ids.discard(request_id)

    # Steps.

    @property
    def has_work(self) -> bool:
        """Whether vLLM's loop would step this engine."""
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> bool:
        """One turn of the core's loop; True if it scheduled tokens."""
        self.steps += 1
        outputs, executed = self.core.step_fn()
        for group in (outputs or {}).values():
            for output in group.outputs:
                self._take(output)
            stats = getattr(group.scheduler_stats, "kv_connector_stats", None)
            if stats:
                self.connector_stats.append(stats)
        self.core.post_step(executed)
        self.steps_with_tokens += bool(executed)
        if not executed and self.scheduler.has_requests():
            self.on_idle()
        return bool(executed)

    def _take(self, output: Any) -> None:
        result = self.results[output.request_id]
        result.tokens.extend(output.new_token_ids)
        if output.finish_reason is not None:
            result.finish_reason = str(output.finish_reason)
            result.kv_transfer_params = output.kv_transfer_params

    def run_until(self, predicate: Callable[[], bool], max_steps: int = 500) -> None:
        """Step until the predicate holds; fail when it does not within ``max_steps``."""
        run_until(predicate, self, max_steps=max_steps)

    def run(self, *request_ids: str, max_steps: int = 500) -> list[Result]:
        """Step until these requests (all if none is named) have ended."""
        names = request_ids or tuple(self.results)
        self.run_until(lambda: all(self.results[name].finished for name in names), max_steps)
        return [self.results[name] for name in names]

    def drain(self, max_steps: int = 500) -> None:
        """Step until vLLM has nothing left to do here, so that every block had to be freed."""
        self.run_until(lambda: not self.has_work, max_steps)

    def describe(self) -> str:
        """One line per live request, for messages of failed assertions."""
        live = [
            f"{name}: {request.status.name}, computed {request.num_computed_tokens}"
            for name, request in self.scheduler.requests.items()
        ]
        return f"step {self.steps}, {self.free_blocks()} free blocks; " + "; ".join(live)


@contextmanager
def _no_process_tuning() -> Iterator[None]:
    """Leave out what the core does to its process (garbage collector, caches, process groups)."""
    names = ("freeze_gc_heap", "enable_envs_cache", "cleanup_dist_env_and_memory", "gc")
    with ExitStack() as stack:
        for name in names:
            if hasattr(engine_core, name):
                stack.enter_context(mock.patch.object(engine_core, name))
        yield


def run_until(predicate: Callable[[], bool], *engines: Engine, max_steps: int = 500) -> None:
    """Step engines in turn until the predicate holds.

    Fails after ``max_steps`` turns in which tokens were scheduled, or when ``PATIENCE_S`` have
    passed, so that a slow machine gets as many idle turns as it needs for answers of a peer.
    """
    deadline_s, busy = time.monotonic() + PATIENCE_S, 0
    while not predicate():
        if busy >= max_steps or time.monotonic() > deadline_s:
            state = " | ".join(engine.describe() for engine in engines)
            raise AssertionError(f"not reached within {busy} steps: {state}")
        turns = [engine.step() for engine in engines]
        busy += any(turns)
