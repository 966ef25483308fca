"""One worker's LLM-DataDist instance: registration, links and pulls, with errors in words.

The only file of the connector that calls the LLM-DataDist API, with the two backends under it.
"""

from collections.abc import Iterator
from typing import Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.errors import (
    ConfigError,
    LinkError,
    TransferError,
    TransferTimeout,
    status_name,
)
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger
from vllm_llmdd_connector.worker.backend import Backend, Fence

logger = get_logger(__name__)

_TIMEOUTS = ("LLM_TIMEOUT", "LLM_WAIT_PROCESS_TIMEOUT")


class DataDistEngine:
    """The LLM-DataDist life of one worker rank."""

    def __init__(
        self,
        config: ConnectorConfig,
        backend: Backend,
        cluster_id: int,
        plans: list[CachePlan],
        is_producer: bool,
    ) -> None:
        backend.check_plans(plans)
        self._backend = backend
        self._api = backend.api
        self._config = config
        self.cluster_id = cluster_id
        self._datadist = backend.start(cluster_id, is_producer)
        # Before any link: the vendor shows a peer only what was registered when it linked.
        try:
            self._caches = [self._register(plan) for plan in plans]
        except BaseException:
            backend.stop()
            raise

    @property
    def listen_port(self) -> int:
        """The port that peers' ``link_clusters`` dials."""
        return self._backend.listen_port

    def link(self, endpoint: WorkerEndpoint) -> None:
        """Link one peer worker; blocks for ``link_timeout_ms`` at most.

        Raises:
            LinkError: names the peer and what the engine says.
        """
        try:
            status = self._backend.link(self._cluster(endpoint))
        except self._api.LLMException as error:
            sentence = self._link_sentence(endpoint, error.status_code, str(error))
            raise LinkError(sentence) from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise LinkError(
                f"link to cluster {endpoint.cluster_id:x} at {endpoint.host}:"
                f"{endpoint.engine_port} is not possible: {error}"
            ) from None
        if status_name(status) != "LLM_SUCCESS":
            raise LinkError(self._link_sentence(endpoint, status, ""))

    def unlink(self, endpoint: WorkerEndpoint) -> None:
        """Forget a link on this side, whatever state it is in."""
        try:
            self._backend.unlink(self._cluster(endpoint))
        except (RuntimeError, ValueError, TypeError) as error:
            logger.debug("cluster %x: unlink: %s", endpoint.cluster_id, error)

    def record_fence(self) -> Fence | None:
        """Device work up to now, which a pull into the same memory must not overtake; None on
        the host. Main thread."""
        return self._backend.record_fence()

    def pull(
        self, peer_cluster_id: int, plan: CachePlan, src_blocks: list[int], dst_blocks: list[int]
    ) -> None:
        """Copy blocks of the peer's cache into ours; returns when they are there.

        Raises:
            TransferTimeout, TransferError: name the cache, the peer and the engine's status.
        """
        key = self._api.BlocksCacheKey(peer_cluster_id, plan.model_id)
        try:
            for src, dst in self._pieces(src_blocks, dst_blocks):
                self._datadist.cache_manager.pull_blocks(
                    key, self._caches[plan.model_id], src, dst, tensor_num_per_layer=1
                )
        except self._api.LLMException as error:
            name = status_name(error.status_code)
            sentence = _joined(
                f"pull_blocks of {len(src_blocks)} blocks of cache {plan.model_id} from cluster "
                f"{peer_cluster_id:x} ended with {name}: {error}",
                self._backend.remedy(error.status_code),
            )
            if name in _TIMEOUTS:
                raise TransferTimeout(sentence) from None
            raise TransferError(sentence) from None

    @property
    def can_push(self) -> bool:
        """Whether the engine knows reservations, an extension of the API."""
        return self._backend.has_reservations

    def new_synchronizer(self, num_layers: int) -> Any:
        """Layer marks in the engine: a transfer waits for them without Python."""
        return self._api.NativeLayerSynchronizer(num_layers)

    def open_reservation(self, plan: CachePlan, blocks: list[int]) -> int:
        """Let a peer's pushes with the returned token write these blocks.

        Raises:
            TransferError: says what the engine says.
        """
        manager = self._datadist.cache_manager
        try:
            return int(manager.open_reservation(self._caches[plan.model_id], blocks))
        except self._api.LLMException as error:
            raise TransferError(f"open_reservation of {len(blocks)} blocks: {error}") from None

    def close_reservation(self, token: int) -> None:
        """No push with this token changes a byte after this has returned."""
        self._datadist.cache_manager.close_reservation(token)

    def start_push(
        self,
        plan: CachePlan,
        synchronizer: Any,
        peer_cluster_id: int,
        token: int,
        src_blocks: list[int],
        dst_positions: list[int],
    ) -> "PushTask":
        """Send blocks layer by layer, each when ``synchronizer`` says that it is computed.

        Raises:
            TransferError: the transfer cannot even start.
        """
        layers = range(len(plan.regions))
        key = self._api.BlocksCacheKey(peer_cluster_id, plan.model_id)
        try:
            config = self._api.TransferWithCacheKeyConfig(key, layers, layers, token=token)
            task = self._datadist.cache_manager.transfer_cache_async(
                self._caches[plan.model_id],
                synchronizer,
                [config],
                src_blocks,
                dst_positions,
                tensor_num_per_layer=1,
            )
        except (self._api.LLMException, ValueError, TypeError) as error:
            raise TransferError(
                f"transfer_cache_async to cluster {peer_cluster_id:x} did not start: {error}"
            ) from None
        return PushTask(task)

    def close(self) -> None:
        """Give everything back; no transfer may run."""
        self._backend.stop()

    def _pieces(
        self, src_blocks: list[int], dst_blocks: list[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        limit = self._backend.max_blocks_per_pull
        for start in range(0, max(len(src_blocks), len(dst_blocks), 1), limit):
            yield src_blocks[start : start + limit], dst_blocks[start : start + limit]

    def _register(self, plan: CachePlan) -> Any:
        api = self._api
        desc = api.CacheDesc(
            len(plan.regions),
            [plan.num_blocks, plan.block_len],
            api.DataType.DT_UINT8,
            **self._backend.placement(),
        )
        key = api.BlocksCacheKey(self.cluster_id, plan.model_id)
        addresses = [region.base for region in plan.regions]
        try:
            return self._datadist.cache_manager.register_blocks_cache(
                desc, addresses, key, remote_accessible=True
            )
        except api.LLMException as error:
            raise ConfigError(
                _joined(
                    f"registration of cache {plan.model_id} ({len(addresses)} tensors of "
                    f"{plan.num_blocks} blocks of {plan.block_len} B) ended with "
                    f"{status_name(error.status_code)}: {error}",
                    self._backend.remedy(error.status_code),
                )
            ) from None

    def _cluster(self, endpoint: WorkerEndpoint) -> Any:
        cluster = self._api.LLMClusterInfo()
        cluster.remote_cluster_id = endpoint.cluster_id
        cluster.append_local_ip_info(self._config.host, 0)
        cluster.append_remote_ip_info(endpoint.host, endpoint.engine_port)
        return cluster

    def _link_sentence(self, endpoint: WorkerEndpoint, status: Any, detail: str) -> str:
        return _joined(
            f"link to cluster {endpoint.cluster_id:x} at "
            f"{endpoint.host}:{endpoint.engine_port} ended with {status_name(status)}",
            detail,
            self._backend.link_error(status, endpoint.cluster_id),
        )


class PushTask:
    """A push that was started."""

    def __init__(self, task: Any) -> None:
        self._task = task

    def wait(self) -> str:
        """Wait for its end; its status by name. Every layer has a timeout in the engine."""
        return status_name(self._task.synchronize())

    def layer_times(self) -> list[tuple[int, int, int]]:
        """Per region that has arrived: its index, and when its push was started and acknowledged;
        nanoseconds of the monotonic clock."""
        times = self._task.layer_times()
        return [(time.layer_index, time.started_ns, time.acknowledged_ns) for time in times]


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
