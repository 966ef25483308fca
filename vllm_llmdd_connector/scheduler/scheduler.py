"""The scheduler-side connector: vLLM's hooks, forwarded to the producer and the consumer half."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.config import MAX_PORT, ConnectorConfig
from vllm_llmdd_connector.control.channel import Server
from vllm_llmdd_connector.control.client import ControlClient
from vllm_llmdd_connector.control.fingerprint import Fingerprint, model_facts
from vllm_llmdd_connector.control.keys import load_key_set
from vllm_llmdd_connector.control.messages import PROTOCOL_VERSION, AnyMessage, Knock, Message
from vllm_llmdd_connector.control.metaserver import MetaserverClient
from vllm_llmdd_connector.deadlines import drain_limit_s
from vllm_llmdd_connector.errors import ConfigError, RemoteProtocolError
from vllm_llmdd_connector.ids import new_instance
from vllm_llmdd_connector.layout.groups import transfer_groups
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.metadata import StepMessage, WorkerHandshake, WorkerReport
from vllm_llmdd_connector.metrics import LlmddStats, TransferStats
from vllm_llmdd_connector.params import metaserver_post, wants_remote_prefill
from vllm_llmdd_connector.scheduler.callers import Callers
from vllm_llmdd_connector.scheduler.consumer import Consumer
from vllm_llmdd_connector.scheduler.producer import Producer
from vllm_llmdd_connector.scheduler.producer_control import ProducerControl
from vllm_llmdd_connector.scheduler.request_trace import ConsumerTrace, ProducerTrace
from vllm_llmdd_connector.scheduler.shutdown import ShutdownNotice
from vllm_llmdd_connector.scheduler.summons import SummonsTable
from vllm_llmdd_connector.trace.recorder import NO_TRACE, open_trace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class SchedulerConnector:
    """One engine's scheduler side. Hooks run on vLLM's scheduling thread."""

    def __init__(
        self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", config: ConnectorConfig
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._stats = TransferStats()
        self._groups = transfer_groups(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._producer: Producer | None = None
        self._consumer: Consumer | None = None
        self._callers: Callers | None = None
        self._client: ControlClient | None = None
        self._summons: SummonsTable | None = None
        self._metaservers = MetaserverClient(config)
        self._is_consumer = transfer.is_kv_consumer
        self._notice = ShutdownNotice(time.monotonic)
        self._drain_s = drain_limit_s(getattr(vllm_config, "shutdown_timeout", 0))
        self._warned_local = False
        self._instance = new_instance()
        self._keys = load_key_set(config.keys_dir)
        self._recorder = open_trace(
            config.trace_dir,
            str(transfer.kv_role),
            str(transfer.engine_id),
            "scheduler",
            instance=self._instance,
        )
        try:
            self._server = Server(
                "llmdd-control-server",
                config.host,
                self._control_port(),
                lambda: self._stats.count("junk_messages"),
                self._keys,
            )
        except ConfigError:
            if self._recorder is not None:
                self._recorder.close()
            raise
        self._producer_trace: ProducerTrace | None = None
        self._consumer_trace: ConsumerTrace | None = None
        if transfer.is_kv_producer:
            self._producer = Producer(
                config,
                transfer.engine_id,
                self._instance,
                self._server.port,
                self._groups,
                kv_cache_config.num_blocks,
                vllm_config.parallel_config.tensor_parallel_size,
                time.monotonic,
                self._stats,
                has_drafts=vllm_config.speculative_config is not None,
            )
            self._callers = Callers(
                config, self._server.port, self._producer, self._stats, self._keys
            )
            if self._recorder is not None:
                block_sizes = [group.block_size for group in self._groups]
                self._producer_trace = ProducerTrace(self._recorder, block_sizes, self._transferred)

    def _control_port(self) -> int:
        if not self._config.control_port:
            return 0
        base = self._config.control_port
        dp_rank: int = self._vllm_config.parallel_config.data_parallel_rank
        if base + dp_rank > MAX_PORT:
            # ZeroMQ would take the port's last 16 bits.
            raise ConfigError(
                f"control_port {base} plus data parallel rank {dp_rank} is {base + dp_rank}, above "
                f"{MAX_PORT}; set control_port lower, or to 0"
            )
        return base + dp_rank

    def set_handshake(self, by_rank: dict[int, WorkerHandshake]) -> None:
        """All workers' parts: from here on peers can be answered and dialled."""
        ranks = [by_rank[rank] for rank in sorted(by_rank)]
        size = self._vllm_config.parallel_config.tensor_parallel_size
        if len(ranks) != size:
            # vLLM will not ask for it, and collecting open sockets with their context may hang.
            self.shutdown()
            raise ConfigError(
                f"{len(ranks)} of {size} workers sent a handshake to LLMDataDistConnector; in a "
                "MultiConnector list it as the first connector, whose handshake alone vLLM hands on"
            )
        fingerprint = Fingerprint(
            protocol_version=PROTOCOL_VERSION,
            groups=ranks[0].groups,
            kv_format=ranks[0].kv_format,
            integrity=self._config.integrity,
            **model_facts(self._vllm_config),
        )
        can_push = self._config.push and all(rank.can_push for rank in ranks)
        control: ProducerControl | None = None
        if self._producer is not None:
            if can_push:
                self._producer.allow_push()
            control = ProducerControl(
                self._config,
                self._instance,
                self._producer,
                fingerprint,
                tuple(rank.endpoint for rank in ranks if rank.endpoint is not None),
                time.monotonic,
                self._stats,
            )
        if self._is_consumer:
            self._open_consumer(fingerprint, can_push, size)
        self._server.start(partial(self._on_message, control))
        logger.info("control channel listens on %s:%d", self._config.host, self._server.port)

    def _open_consumer(self, fingerprint: Fingerprint, can_push: bool, num_ranks: int) -> None:
        self._client = ControlClient(
            fingerprint,
            time.monotonic,
            lambda number: self._stats.count("junk_messages", number),
            takes_push=can_push,
            deadlines=self._config,
            keys=self._keys,
            trace=self._recorder or NO_TRACE,
        )
        block_sizes = [group.block_size for group in self._groups]
        make_post = partial(
            metaserver_post,
            engine_id=self._vllm_config.kv_transfer_config.engine_id,
            address=(self._config.host, self._server.port),
            block_sizes=block_sizes,
            num_ranks=num_ranks,
        )
        self._summons = SummonsTable(
            self._config, self._metaservers, self._client, make_post, time.monotonic
        )
        self._consumer = Consumer(
            self._config,
            block_sizes,
            self._client,
            time.monotonic,
            self._stats,
            self._groups,
            self._summons,
        )
        if self._recorder is not None:
            self._consumer_trace = ConsumerTrace(self._recorder, self._consumer.transfer_of)

    def _on_message(
        self,
        control: ProducerControl | None,
        message: AnyMessage,
        reply: Callable[[Message], None],
    ) -> None:
        """Control server's thread: what a D says to a P, and a P to a D."""
        if isinstance(message, Knock) and self._summons is not None:
            self._summons.on_knock(message)
        elif control is not None:
            control.handle(message, reply)
        else:
            raise RemoteProtocolError(f"{type(message).__name__} is not for a decode server")

    def bind_block_pool(self, block_pool: "BlockPool") -> None:
        if self._producer is not None:
            self._producer.bind_block_pool(block_pool)

    def on_new_request(self, request: "Request") -> None:
        if self._drain_s:
            self._notice.arm()
        if self._callers is not None:
            self._callers.on_new_request(request)
        if self._producer_trace is not None:
            self._producer_trace.on_new_request(request)
        if self._consumer is not None:
            self._consumer.on_new_request(request)
            if self._consumer_trace is not None:
                self._consumer_trace.on_new_request(request)
            if self._producer is None and not wants_remote_prefill(request.kv_transfer_params):
                self._count_local_prefill(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._producer is not None and self._producer.must_wait(request):
            return None, False
        if self._consumer is None:
            return 0, False
        return self._consumer.num_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self._consumer is None:
            return
        if not self._consumer.is_open(request.request_id):
            self._consumer.on_placed(request.request_id)
            return
        if self._consumer_trace is not None:
            self._consumer_trace.on_allocated(request, num_external_tokens)
        block_ids = self._transferred(blocks.get_block_ids())
        self._consumer.on_allocated(request.request_id, block_ids, num_external_tokens)

    def loaded_group_ids(self) -> tuple[int, ...]:
        return tuple(group.group_id for group in self._groups)

    def build_connector_meta(self, output: "SchedulerOutput") -> StepMessage:
        step = StepMessage()
        if self._producer is not None:
            self._producer.fill(step, output)
        if self._consumer is not None:
            self._consumer.fill(step)
        if self._producer_trace is not None:
            self._producer_trace.fill(step, output)
        if self._consumer_trace is not None:
            self._consumer_trace.fill(output)
        return step

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        if self._consumer is None:
            return
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._consumer.on_failed(report.failed)
        if output.finished_recving:
            self._consumer.on_received(output.finished_recving)

    def request_finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never has vLLM keep the request; the params are D's."""
        if self._consumer_trace is not None:
            self._consumer_trace.request_finished(request)
        if self._consumer is not None:
            self._consumer.request_finished(request)
        if self._producer is None:
            return False, None
        params = self._producer.request_finished(request, block_ids)
        if self._producer_trace is not None:
            self._producer_trace.request_finished(request, params is not None)
        return False, params

    def reset_cache(self) -> bool:
        """The prefix cache is to be reset: give back what ended leases still hold."""
        if self._producer is not None:
            self._producer.free_ended()
        return True

    def has_pending_work(self) -> bool:
        """Whether a stopping server still holds something for a D; False while nobody has asked it
        to stop, because vLLM would step without pause."""
        asked_s = self._notice.asked_s
        if asked_s is None or self._producer is None or not self._producer.is_owed:
            return False
        return time.monotonic() < asked_s + self._drain_s

    def take_stats(self) -> LlmddStats | None:
        return self._stats.take()

    def shutdown(self) -> None:
        self._server.close()
        self._metaservers.close()
        if self._callers is not None:
            self._callers.close()
        if self._client is not None:
            self._client.close()
        if self._recorder is not None:
            self._recorder.close()

    def _transferred(self, block_ids: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [block_ids[group.group_id] for group in self._groups]

    def _count_local_prefill(self, request: "Request") -> None:
        self._stats.count("local_prefills")
        if not self._warned_local:
            self._warned_local = True
            logger.warning(
                "request %s came without a remote prefill in kv_transfer_params and is prefilled "
                "locally; further ones are only counted (local_prefills). Does the proxy hand on "
                "the prefill server's kv_transfer_params?",
                request.request_id,
            )
