"""The worker-side connector: vLLM's hooks of one rank.

The hooks run on the worker's main thread and never wait for a peer: jobs are queued for their
peer's thread, and results are picked up once per step. P's worker takes part in pushes only: its
engine answers pulls by itself, its scheduler confirms them.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.channel import Server, new_context
from vllm_llmdd_connector.control.keys import load_key_set
from vllm_llmdd_connector.control.messages import (
    AnyMessage,
    AskSums,
    CancelAck,
    CancelAll,
    Message,
    WorkerEndpoint,
)
from vllm_llmdd_connector.errors import ConfigError, RemoteProtocolError, TransferError
from vllm_llmdd_connector.ids import cluster_id, new_instance
from vllm_llmdd_connector.layout.groups import Group, transfer_groups
from vllm_llmdd_connector.layout.kv_layout import CachePlan, group_geometry, plan_caches
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import (
    Job,
    SentPrompt,
    StepMessage,
    WorkerHandshake,
    WorkerReport,
)
from vllm_llmdd_connector.metrics import LlmddStats, TransferStats
from vllm_llmdd_connector.trace.recorder import NO_TRACE, Recorder, Trace, open_trace
from vllm_llmdd_connector.worker.backend import Fence, choose_backend
from vllm_llmdd_connector.worker.checksum import BlockReader
from vllm_llmdd_connector.worker.completion import Completions, Drained
from vllm_llmdd_connector.worker.digest import DigestLog
from vllm_llmdd_connector.worker.engine import DataDistEngine
from vllm_llmdd_connector.worker.kv_format import kv_format
from vllm_llmdd_connector.worker.lease_sums import LeaseSums
from vllm_llmdd_connector.worker.peer import PeerThread
from vllm_llmdd_connector.worker.peer_link import PeerContext
from vllm_llmdd_connector.worker.peers import Peer, Peers
from vllm_llmdd_connector.worker.push import Pusher
from vllm_llmdd_connector.worker.push_sums import PushSums
from vllm_llmdd_connector.worker.reports import Reports, Transfer
from vllm_llmdd_connector.worker.step_trace import StepTrace, cache_facts
from vllm_llmdd_connector.worker.sum_thread import SumThread
from vllm_llmdd_connector.worker.verify import Verifier

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class WorkerConnector:
    """One rank's worker side."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        config: ConnectorConfig,
        tp_rank: int,
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._config = config
        self._engine_id = str(transfer.engine_id)
        self._role = str(transfer.kv_role)
        self._is_producer = bool(transfer.is_kv_producer)
        self._is_consumer = bool(transfer.is_kv_consumer)
        self._tp_rank = tp_rank
        self._groups: list[Group] = transfer_groups(kv_cache_config)
        self._num_blocks = kv_cache_config.num_blocks
        self._stats = TransferStats()
        self._completions = Completions()
        self._digests = (
            DigestLog(config.kv_digest, self._role, tp_rank) if config.kv_digest else None
        )
        self._keys = load_key_set(config.keys_dir)
        self._zmq_context = new_context()
        self._peers = Peers(self._make_peer)
        self._plans: list[CachePlan] = []
        self._engine: DataDistEngine | None = None
        self._handshake: WorkerHandshake | None = None
        self._peer_context: PeerContext | None = None
        self._pusher: Pusher | None = None
        self._recorder: Recorder | None = None
        self._trace: Trace = NO_TRACE
        self._steps: StepTrace | None = None
        self._server: Server | None = None
        self._sum_thread: SumThread | None = None
        self._lease_sums: LeaseSums | None = None
        self._failed: dict[str, str] = {}
        self._failed_blocks: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register every KV tensor with the engine and open this rank's endpoint.

        Raises:
            ConfigError: the engine cannot move a tensor's memory or does not start, a tensor is not
            made of blocks, or a port is taken. Nothing stays open then.
        """
        try:
            self._register(kv_caches)
        except ConfigError:
            self.shutdown()
            raise

    def _register(self, kv_caches: dict[str, Any]) -> None:
        backend = choose_backend(self._config, kv_caches)
        self._plans = plan_caches(
            [group.layers for group in self._groups], kv_caches, self._num_blocks
        )
        own_cluster = cluster_id(self._engine_id, new_instance(), self._tp_rank)
        self._engine = DataDistEngine(
            self._config, backend, own_cluster, self._plans, self._is_producer
        )
        self._start_trace(own_cluster)
        reader = BlockReader(self._plans) if self._config.integrity != "off" else None
        if self._is_producer:
            self._start_sending(self._engine, reader)
        self._handshake = WorkerHandshake(
            tp_rank=self._tp_rank,
            endpoint=self._endpoint(self._engine) if self._is_producer else None,
            groups=tuple(
                group_geometry(
                    group.kind, group.block_size, group.layers, kv_caches, self._num_blocks
                )
                for group in self._groups
            ),
            can_push=self._engine.can_push,
            kv_format=kv_format(self._vllm_config, self._groups),
        )
        self._peer_context = PeerContext(
            config=self._config,
            engine=self._engine,
            plans=self._plans,
            completions=self._completions,
            stats=self._stats,
            digests=self._digests,
            zmq_context=self._zmq_context,
            tp_rank=self._tp_rank,
            trace=self._trace,
            keys=self._keys,
            verifier=None if reader is None else self._verifier(reader),
        )
        self._log_registration(own_cluster)

    @property
    def handshake(self) -> WorkerHandshake | None:
        return self._handshake

    def apply_voids(self, step: StepMessage) -> None:
        """Blocks that the step may overwrite are not to be sent any more; before anything else."""
        if step.voids and self._pusher is not None:
            self._pusher.void(step.voids)
        if self._lease_sums is not None:
            self._lease_sums.update(step.leased, step.unleased)

    def bind(self, step: StepMessage) -> None:
        """Take over a step's orders; before its forward."""
        if step.is_empty:
            return
        for prompt in step.sent_prompts:
            self._digest(prompt)
        if self._steps is not None and (step.chunks or step.traced):
            self._steps.begin([*step.chunks, *step.traced])
        if step.chunks and self._pusher is not None:
            self._pusher.begin_step(step.chunks)
        if step.jobs:
            assert self._engine is not None
            fence = self._engine.record_fence()
            for job in step.jobs:
                self._start(job, fence)
        for request_id, reason in step.cancels.items():
            self._give_up(request_id, reason)

    def layer_computed(self, layer_name: str) -> None:
        """An attention layer has written its KV of this step."""
        if self._pusher is not None:
            self._pusher.layer_computed(layer_name)

    def forward_ended(self) -> None:
        """Every layer of this step is computed, also those that no hook reports."""
        if self._steps is not None:
            self._steps.end()
        if self._pusher is not None:
            self._pusher.end_step()

    def _traced_layer_computed(self, layer_name: str) -> None:
        """``layer_computed`` while tracing is on."""
        assert self._steps is not None
        self._steps.layer_computed(layer_name)
        if self._pusher is not None:
            self._pusher.layer_computed(layer_name)

    def poll(self) -> Drained:
        """Requests to report as received or failed. Each is returned once."""
        drained = self._completions.drain()
        if drained is None:
            return Drained()
        self._failed.update(drained.failed)
        self._failed_blocks |= drained.failed_blocks
        return drained

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the requests that ``poll`` returned as failed; for vLLM before 0.30."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def take_report(self) -> WorkerReport | None:
        """What the scheduler side learns beyond vLLM's own reports; None in most steps."""
        if not self._failed:
            return None
        failed, self._failed = self._failed, {}
        return WorkerReport(failed=failed)

    def take_stats(self) -> LlmddStats | None:
        return self._stats.take()

    def shutdown(self) -> None:
        """Stop all threads and give the memory registrations back; idempotent."""
        self._peers.close()
        if self._server is not None:
            self._server.close()
        if self._pusher is not None:
            self._pusher.close()
        if self._sum_thread is not None:
            self._sum_thread.close()
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        self._zmq_context.term()
        if self._recorder is not None:
            self._recorder.close()

    def _endpoint(self, engine: DataDistEngine) -> WorkerEndpoint:
        return WorkerEndpoint(
            cluster_id=engine.cluster_id,
            host=self._config.host,
            engine_port=engine.listen_port,
            link_secret=engine.link_secret,
            control_port=0 if self._server is None else self._server.port,
        )

    def _start_trace(self, own_cluster: int) -> None:
        self._recorder = open_trace(
            self._config.trace_dir,
            self._role,
            self._engine_id,
            f"rank {self._tp_rank}",
            cluster=f"{own_cluster:x}",
            caches=cache_facts(self._plans),
        )
        if self._recorder is None:
            return
        self._trace = self._recorder
        if self._is_producer:
            self._steps = StepTrace(self._trace)
            # The hook itself is exchanged, so that it asks nothing while tracing is off.
            self.layer_computed = self._traced_layer_computed  # type: ignore[method-assign]

    def _verifier(self, reader: BlockReader) -> Verifier:
        return Verifier(
            self._plans,
            self._config.integrity,
            reader,
            self._stats,
            self._completions.is_cancelled,
        )

    def _start_sending(self, engine: DataDistEngine, reader: BlockReader | None) -> None:
        """What answers D's workers: pushes, and with ``reader`` checksums."""
        push_sums: PushSums | None = None
        if reader is not None:
            policy, thread = self._config.integrity, SumThread(reader)
            self._sum_thread = thread
            self._lease_sums = LeaseSums(self._plans, policy, thread, engine.cluster_id)
            push_sums = PushSums(self._plans, policy, thread)
        if self._config.push and engine.can_push:
            block_sizes = [group.block_size for group in self._groups]
            self._pusher = Pusher(
                engine,
                self._plans,
                block_sizes,
                time.monotonic,
                self._stats,
                self._trace,
                push_sums,
            )
        if self._pusher is None and self._lease_sums is None:
            return
        self._server = Server(
            "llmdd-worker-control",
            self._config.host,
            0,
            lambda: self._stats.count("junk_messages"),
            self._keys,
        )
        self._server.start(self._on_message)

    def _on_message(self, message: AnyMessage, reply: Callable[[Message], None]) -> None:
        """Control thread: what a D's worker says."""
        if isinstance(message, AskSums) and self._lease_sums is not None:
            self._lease_sums.handle(message, reply)
        elif self._pusher is not None:
            self._pusher.handle(message, reply)
        elif isinstance(message, CancelAll):
            reply(CancelAck())  # before a link, where D's engine has no reservations
        else:
            raise RemoteProtocolError(f"{type(message).__name__} is not for this prefill worker")

    def _give_up(self, request_id: str, reason: str) -> None:
        if not reason:
            self._completions.cancel(request_id)
        self._peers.give_up(request_id, reason or "aborted")

    def _start(self, job: Job, fence: Fence | None) -> None:
        self._completions.expect(job.request_id, job.loaded_blocks)
        endpoint = job.workers[self._tp_rank]
        try:
            self._peers.start(job, endpoint, fence)
        except TransferError as error:
            assert self._peer_context is not None
            reports = Reports(self._peer_context, endpoint, forget=lambda request_id: None)
            now_s = time.monotonic()
            reports.failed(Transfer(job, fence, now_s, now_s), "queue", str(error))

    def _make_peer(
        self,
        endpoint: WorkerEndpoint,
        control_address: tuple[str, int],
        on_end: Callable[[Peer], None],
    ) -> Peer:
        assert self._peer_context is not None
        return PeerThread(self._peer_context, endpoint, control_address, on_end)

    def _digest(self, prompt: SentPrompt) -> None:
        assert self._digests is not None
        for plan in self._plans:
            ids = prompt.block_ids[plan.group_index]
            self._digests.write("send", prompt.request_id, prompt.transfer_id, plan, 0, ids)

    def _log_registration(self, own_cluster: int) -> None:
        num_regions = sum(len(plan.regions) for plan in self._plans)
        num_bytes = sum(plan.block_len * len(plan.regions) for plan in self._plans)
        logger.info(
            "cluster %x (rank %d, %s): registered %d KV tensors in %d caches, %d blocks of %d B",
            own_cluster,
            self._tp_rank,
            self._role,
            num_regions,
            len(self._plans),
            self._num_blocks,
            num_bytes,
        )
