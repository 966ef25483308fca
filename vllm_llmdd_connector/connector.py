"""``LLMDataDistConnector``: what vLLM loads. A thin facade that forwards each hook by role.

One source serves vLLM 0.23 to 0.33: hooks that a release does not know are simply never called
there, and ``get_transfer_results`` (0.30) and ``get_finished`` (before) drain the same results.
vLLM's frontend imports this module, so it imports vLLM's base class and nothing heavy.
"""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_llmdd_connector.config import ConnectorConfig, read_config
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.layout.groups import transfer_groups
from vllm_llmdd_connector.metadata import StepMessage, WorkerHandshake
from vllm_llmdd_connector.metrics import LlmddPromMetrics, LlmddStats
from vllm_llmdd_connector.scheduler.scheduler import SchedulerConnector
from vllm_llmdd_connector.worker.worker import WorkerConnector

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
except ImportError:  # vLLM before 0.30
    KVConnectorTransferResults = None
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32
    CacheHitSource = None

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class LLMDataDistConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector over the LLM-DataDist API."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = read_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        _check_topology(vllm_config)
        _check_modes(vllm_config, config)
        if vllm_config.kv_transfer_config.is_kv_consumer:
            _check_failure_route(kv_cache_config)
        self._scheduler: SchedulerConnector | None = None
        self._worker: WorkerConnector | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerConnector(vllm_config, kv_cache_config, config)
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            rank = get_tensor_model_parallel_rank()
            self._worker = WorkerConnector(vllm_config, kv_cache_config, config, rank)

    @property
    def _scheduler_side(self) -> SchedulerConnector:
        assert self._scheduler is not None, "scheduler hook called on the worker's instance"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerConnector:
        assert self._worker is not None, "worker hook called on the scheduler's instance"
        return self._worker

    # Scheduler side

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Called directly before vLLM 0.30, and by the base's ``bind_kv_cache_manager`` since."""
        self._scheduler_side.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        return self._scheduler_side.loaded_group_ids()

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Since vLLM 0.24: keeps the engine stepping although no request runs."""
        return self._scheduler_side.has_pending_work()

    def reset_cache(self) -> bool:
        return self._scheduler_side.reset_cache()

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        by_rank = {
            rank: part for rank, part in metadata.items() if isinstance(part, WorkerHandshake)
        }
        self._scheduler_side.set_handshake(by_rank)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        self._worker_side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker_side.handshake

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMessage)
        self._worker_side.apply_voids(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMessage)
        self._worker_side.bind(connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Pulls were started with the metadata: since vLLM 0.29 this runs after the forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded inside a forward: a request waits outside until its blocks are
        there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: "torch.Tensor",
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Nothing is saved here: transfers that wait for this layer may send it."""
        self._worker_side.layer_computed(layer_name)

    def on_kv_cache_written(self, layer_name: str = "") -> None:
        """vLLM-Ascend's hook, before the attention itself: the layer may be sent that much
        earlier."""
        self._worker_side.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        """Nothing is waited for: what no layer hook reported may be sent now."""
        self._worker_side.forward_ended()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        drained = self._worker_side.poll()
        return None, (drained.received | drained.failed.keys()) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        drained = self._worker_side.poll()
        self._worker_side.take_failed_blocks()
        return KVConnectorTransferResults(
            finished_recving=drained.received | drained.failed.keys(),
            failed_recving=set(drained.failed),
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker_side.take_report()

    # Both sides

    def get_kv_connector_stats(self) -> LlmddStats | None:
        side = self._scheduler or self._worker_side
        return side.take_stats()

    def shutdown(self) -> None:
        side = self._scheduler or self._worker_side
        side.shutdown()

    # Asked of the class

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LlmddStats | None:
        return LlmddStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LlmddPromMetrics:
        return LlmddPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full graph's replay calls no layer hook: a prompt would be sent only after its last
        layer."""
        return bool(extra_config.get("push", ConnectorConfig().push))

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: "KVTransferConfig") -> bool:
        """Sleep moves the KV tensors away from under their registration."""
        return False


def _check_topology(vllm_config: "VllmConfig") -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(f"{name} is {size}; LLMDataDistConnector supports 1, set it to 1")
    num_nodes = getattr(parallel, "nnodes_within_dp", 1)
    if num_nodes > 1:
        raise ConfigError(
            f"one engine's ranks are on {num_nodes} machines, but LLMDataDistConnector publishes "
            "one host for all of them; keep tensor parallelism within a machine, or lower --nnodes"
        )


def _check_modes(vllm_config: "VllmConfig", config: ConnectorConfig) -> None:
    """Ways of running under which the registered KV cache is not what is computed, or when."""
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "sleep mode takes the KV cache away from under its registration; leave "
            "--enable-sleep-mode out"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "each server would scale its KV cache by what it has seen itself; leave "
            "--calculate-kv-scales out"
        )
    is_pusher = vllm_config.kv_transfer_config.is_kv_producer and config.push
    if is_pusher and getattr(vllm_config.parallel_config, "use_ubatching", False):
        raise ConfigError(
            "a batch is computed in several parts, and a layer would be pushed after the first; "
            "set push to false in kv_connector_extra_config, or leave --enable-dbo and "
            "--ubatch-size out"
        )


def _check_failure_route(kv_cache_config: "KVCacheConfig") -> None:
    """Before 0.30 vLLM is told of a failed load by block ids, which it looks up in block tables.

    It cannot do so with several groups, and in a windowed group's table the null block, which every
    request shares, stands for what has left the window.
    """
    if KVConnectorTransferResults is not None:
        return
    groups = transfer_groups(kv_cache_config)
    if len(groups) == 1 and "Window" not in groups[0].kind and "Chunked" not in groups[0].kind:
        return
    kinds = ", ".join(group.kind for group in groups)
    raise ConfigError(
        f"the model's KV cache groups are {kinds}, and this vLLM cannot be told that a load into "
        "them failed; use vLLM 0.30 or newer, or, for a model with full "
        "attention too, --disable-hybrid-kv-cache-manager"
    )
