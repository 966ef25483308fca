"""What the connector's hooks cost in each engine step.

Calls every hook that vLLM calls in a step, scheduler side and worker side, in vLLM's order, on a
real connector with a real engine behind it, and prints one JSON line per arm:

* ``idle``: running requests that have nothing to transfer (1, 64 and 256 of them);
* ``layer_hook``: one layer's hook in such a step (in a step that pushes: ``bench_layer_overlap``);
* ``admit``: a D request of 8,192 blocks is allocated and its pull ordered;
* ``after_admit``: the steps that follow while its blocks are awaited;
* ``hand_over``: a P request of 8,192 blocks finishes and its lease is opened.

``copy_ids_us`` is the plain cost of what cannot be avoided: two lists of as many block ids.
"""

import argparse
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from report import Report, quantiles
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput

from vllm_llmdd_connector.connector import LLMDataDistConnector
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.control.session import Granted
from vllm_llmdd_connector.params import Ticket, prompt_hash, response_params

NUM_LAYERS = 30
NUM_BLOCKS = 20_000
BLOCK_SIZE = 16
LONG_BLOCKS = 8_192
RUNNING = (1, 64, 256)


class InstantControl:
    """Stands in for the network: grants every claim at once."""

    def __init__(self, block_ids: tuple[int, ...]) -> None:
        self._block_ids = block_ids
        self._outcomes: list[Granted] = []

    def claim(self, claim_id: int, ticket: Ticket, deadline_s: float) -> None:
        endpoint = WorkerEndpoint(cluster_id=1, host="127.0.0.1", engine_port=1, control_port=0)
        self._outcomes.append(Granted(claim_id, 1, 1, "s", (self._block_ids,), (endpoint,)))

    def drop(self, claim_id: int, ticket: Ticket, deadline_s: float) -> None:
        pass

    def finish(self, claim_id: int, ticket: Ticket) -> None:
        pass

    def take_outcomes(self) -> list[Granted]:
        taken, self._outcomes = self._outcomes, []
        return taken


class Pair:
    """A scheduler-side and a worker-side connector of one role, as in one vLLM server."""

    def __init__(self, role: str) -> None:
        config = _vllm_config(role)
        cache = _kv_cache_config()
        self.scheduler = LLMDataDistConnector(config, KVConnectorRole.SCHEDULER, cache)
        self.scheduler.bind_gpu_block_pool(BlockPool(NUM_BLOCKS, False, BLOCK_SIZE))
        with mock.patch("vllm.distributed.parallel_state.get_tensor_model_parallel_rank", int):
            self.worker = LLMDataDistConnector(config, KVConnectorRole.WORKER, cache)
        tensors = torch.zeros((NUM_LAYERS, NUM_BLOCKS, 1, BLOCK_SIZE, 2), dtype=torch.bfloat16)
        self.worker.register_kv_caches({f"layer.{i}": tensors[i] for i in range(NUM_LAYERS)})
        self.scheduler.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        self._layers = [(f"layer.{i}", tensors[i]) for i in range(NUM_LAYERS)]

    def step(self) -> None:
        """One engine step's hooks, with a forward of nothing."""
        worker = self.worker
        metadata = self.scheduler.build_connector_meta(None)
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for name, tensor in self._layers:
            worker.wait_for_layer_load(name)
            worker.save_kv_layer(name, tensor, None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        worker.get_kv_connector_kv_cache_events()
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            kv_connector_worker_meta=report,
        )
        self.scheduler.update_connector_output(output)
        self.scheduler.get_kv_connector_stats()

    def layer_hooks(self) -> None:
        """What the layers of a step without work call."""
        for name, tensor in self._layers:
            self.worker.save_kv_layer(name, tensor, None)

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def _vllm_config(role: str) -> Any:
    transfer = SimpleNamespace(
        kv_role=role,
        is_kv_producer=role != "kv_consumer",
        is_kv_consumer=role != "kv_producer",
        engine_id="bench",
        kv_connector_extra_config={"max_lease_s": 1e6, "lease_s": 1e6},
    )
    parallel = SimpleNamespace(tensor_parallel_size=1, data_parallel_rank=0)
    model = SimpleNamespace(
        model="bench", dtype="torch.bfloat16", hf_config=SimpleNamespace(to_dict=dict)
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        parallel_config=parallel,
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
    )


def _kv_cache_config() -> Any:
    spec = type("FullAttentionSpec", (), {"block_size": BLOCK_SIZE})()
    layers = [f"layer.{i}" for i in range(NUM_LAYERS)]
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=layers)
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=[group])


def _request(name: str, num_tokens: int, params: dict[str, Any] | None) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=list(range(num_tokens)),
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
        num_prompt_tokens=num_tokens,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def _ticket_params(num_tokens: int) -> dict[str, Any]:
    ticket = Ticket(
        host="127.0.0.1",
        port=1,
        instance="bench",
        transfer_id="bench",
        production=1,
        secret="bench",
        num_tokens=num_tokens,
        prompt_hash=prompt_hash(list(range(num_tokens)), None, ()),
    )
    return response_params(ticket, "bench", [[]])


def _timed_us(action: Any) -> float:
    started_ns = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - started_ns) / 1000


def bench_idle(report: Report, role: str, num_steps: int) -> None:
    """Steps with running requests that never had, or no longer have, anything to transfer."""
    pair = Pair(role)
    try:
        known = 0
        for running in RUNNING:
            while known < running:
                pair.scheduler.on_new_request(_request(f"running-{known}", 8, None))
                known += 1
            for _ in range(100):
                pair.step()
            samples = [_timed_us(pair.step) for _ in range(num_steps)]
            report.line("steps", "idle", role=role, running=running, step_us=quantiles(samples))
        hooks = [_timed_us(pair.layer_hooks) / NUM_LAYERS for _ in range(num_steps)]
        report.line("steps", "layer_hook", role=role, hook_us=quantiles(hooks))
    finally:
        pair.close()


def bench_admit(report: Report, num_rounds: int) -> None:
    """D: the step that allocates a long request's blocks, and the ones that follow."""
    num_tokens = LONG_BLOCKS * BLOCK_SIZE
    src_blocks = tuple(range(1, LONG_BLOCKS + 1))
    params = _ticket_params(num_tokens)
    pair = Pair("kv_consumer")
    consumer = pair.scheduler._scheduler_side._consumer
    assert consumer is not None
    consumer._control = InstantControl(src_blocks)
    admit, after, copy_ids = [], [], []
    try:
        for number in range(num_rounds):
            request = _request(f"long-{number}", num_tokens, dict(params))
            blocks = SimpleNamespace(get_block_ids=lambda: (list(src_blocks),))
            consumer.on_new_request(request)

            def admit_step(request: Any = request, blocks: Any = blocks) -> None:
                pair.scheduler.get_num_new_matched_tokens(request, 0)
                pair.scheduler.update_state_after_alloc(request, blocks, num_tokens)
                pair.step()

            admit.append(_timed_us(admit_step))
            after.extend(_timed_us(pair.step) for _ in range(20))
            copy_ids.append(_timed_us(lambda: [list(src_blocks), list(src_blocks)]))
    finally:
        pair.close()
    fields = {"role": "kv_consumer", "blocks": LONG_BLOCKS}
    report.line(
        "steps",
        "admit",
        **fields,
        step_us=quantiles(admit),
        copy_ids_us=quantiles(copy_ids),
    )
    report.line("steps", "after_admit", **fields, step_us=quantiles(after))


def bench_hand_over(report: Report, num_rounds: int) -> None:
    """P: the step in which a long prompt finishes and its lease is opened."""
    num_tokens = LONG_BLOCKS * BLOCK_SIZE
    block_ids = (list(range(1, LONG_BLOCKS + 1)),)
    pair = Pair("kv_producer")
    samples = []
    try:
        for number in range(num_rounds):
            request = _request(f"done-{number}", num_tokens, {"do_remote_decode": True})

            def finish_step(request: Any = request) -> None:
                pair.scheduler.request_finished_all_groups(request, block_ids)
                pair.step()

            samples.append(_timed_us(finish_step))
    finally:
        pair.close()
    report.line(
        "steps", "hand_over", role="kv_producer", blocks=LONG_BLOCKS, step_us=quantiles(samples)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="idle steps per arm")
    parser.add_argument("--rounds", type=int, default=50, help="long requests per arm")
    args = parser.parse_args()
    report = Report()
    for role in ("kv_producer", "kv_consumer", "kv_both"):
        bench_idle(report, role, args.steps)
    bench_admit(report, args.rounds)
    bench_hand_over(report, args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
