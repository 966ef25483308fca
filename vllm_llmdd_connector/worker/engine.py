"""One worker's LLM-DataDist instance: registration, links, pulls and pushes, with errors in words.

The only file of the connector that calls the LLM-DataDist API, with the two backends under it.
"""

from collections.abc import Callable, Iterator
from typing import Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.deadlines import Deadlines
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

    @property
    def link_secret(self) -> str:
        """What peers must know to link over NIXL; it goes to them on the control channel only."""
        return self._backend.link_secret

    def link(self, endpoint: WorkerEndpoint) -> None:
        """Link one peer worker; blocks for ``link_timeout_ms`` at most.

        Raises:
            LinkError: names the peer and what the engine says.
        """
        try:
            status = self._backend.link(self._cluster(endpoint.cluster_id, endpoint))
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
        self._unlink(endpoint.cluster_id, endpoint)

    def drop_link(self, peer_cluster_id: int) -> None:
        """The same for a link that the peer has made, after a failed push: what it still had under
        way is not to arrive later."""
        self._unlink(peer_cluster_id, None)

    def _unlink(self, cluster_id: int, endpoint: WorkerEndpoint | None) -> None:
        try:
            self._backend.unlink(self._cluster(cluster_id, endpoint))
        except (RuntimeError, ValueError, TypeError) as error:
            logger.debug("cluster %x: unlink: %s", cluster_id, error)

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
                with self._backend.on_link(peer_cluster_id):
                    self._datadist.cache_manager.pull_blocks(
                        key, self._caches[plan.model_id], src, dst, tensor_num_per_layer=1
                    )
        except self._api.LLMException as error:
            what = (
                f"pull_blocks of {len(src_blocks)} blocks of cache {plan.model_id} from cluster "
                f"{peer_cluster_id:x}"
            )
            raise self._transfer_error(what, error.status_code, str(error)) from None

    @property
    def can_push(self) -> bool:
        """Whether this installation of the engine can push at all."""
        return self._backend.can_push

    @property
    def has_reservations(self) -> bool:
        """Whether the engine keeps a peer's pushes to blocks set aside, an extension of the API.

        With them ``start_push`` is used, without them ``push_layer`` and ``push_layers``.
        """
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
        return PushTask(task, self._config)

    def push_layer(
        self,
        plan: CachePlan,
        layer: int,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
    ) -> None:
        """Write blocks of one layer into the peer's; returns when they are there.

        Raises:
            TransferTimeout, TransferError: name the cache, the peer and the engine's status.
        """
        layers = range(layer, layer + 1)
        key = self._api.BlocksCacheKey(peer_cluster_id, plan.model_id)
        try:
            for src, dst in self._pieces(src_blocks, dst_blocks):
                with self._backend.on_link(peer_cluster_id):
                    self._datadist.cache_manager.push_blocks(
                        key,
                        self._caches[plan.model_id],
                        src,
                        dst,
                        src_layer_range=layers,
                        dst_layer_range=layers,
                        tensor_num_per_layer=plan.tensors_per_layer,
                    )
        except self._api.LLMException as error:
            what = f"push_blocks of layer {layer} of cache {plan.model_id} to {peer_cluster_id:x}"
            raise self._transfer_error(what, error.status_code, str(error)) from None

    def can_push_layers(self, plan: CachePlan, num_blocks: int) -> bool:
        """Whether ``push_layers`` takes this cache: a layer of the API's call has two tensors."""
        return (
            self._backend.layer_transfers is not None
            and plan.tensors_per_layer == 2
            and num_blocks <= self._backend.max_blocks_per_call
        )

    def push_layers(
        self,
        plan: CachePlan,
        peer_cluster_id: int,
        src_blocks: list[int],
        dst_blocks: list[int],
        wait_for_layer: Callable[[int], bool],
    ) -> int:
        """Write all layers, each after ``wait_for_layer``; one such call at a time in a process.

        Returns how many have arrived: all, or those before the one at which ``wait_for_layer``
        returned False.

        Raises:
            TransferTimeout, TransferError: as ``push_layer``; some layers may have arrived.
        """
        transfers = self._backend.layer_transfers
        assert transfers is not None, "see can_push_layers"
        key = self._api.BlocksCacheKey(peer_cluster_id, plan.model_id)
        what = f"transfer_cache_async of cache {plan.model_id} to cluster {peer_cluster_id:x}"
        try:
            with self._backend.on_link(peer_cluster_id):
                num_arrived, status = transfers.transfer_layers(
                    self._caches[plan.model_id],
                    key,
                    plan.num_layers,
                    src_blocks,
                    dst_blocks,
                    wait_for_layer,
                )
        except self._api.LLMException as error:
            raise self._transfer_error(what, error.status_code, str(error)) from None
        if status_name(status) != "LLM_SUCCESS":
            raise self._transfer_error(what, status, "")
        return num_arrived

    def close(self) -> None:
        """Give everything back; no transfer may run."""
        self._backend.stop()

    def _pieces(
        self, src_blocks: list[int], dst_blocks: list[int]
    ) -> Iterator[tuple[list[int], list[int]]]:
        limit = self._backend.max_blocks_per_call
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
        manager = self._datadist.cache_manager
        try:
            cache = manager.register_blocks_cache(desc, addresses, key, remote_accessible=True)
            if self.has_reservations:
                # Peers name blocks by their position in what was set aside for them, or not at all.
                manager.require_reservations(cache)
            return cache
        except api.LLMException as error:
            raise ConfigError(
                _joined(
                    f"registration of cache {plan.model_id} ({len(addresses)} tensors of "
                    f"{plan.num_blocks} blocks of {plan.block_len} B) ended with "
                    f"{status_name(error.status_code)}: {error}",
                    self._backend.remedy(error.status_code),
                )
            ) from None

    def _transfer_error(self, what: str, status: Any, detail: str) -> TransferError:
        name = status_name(status)
        sentence = _joined(f"{what} ended with {name}", detail, self._backend.remedy(status))
        if name in _TIMEOUTS:
            limit = self._config.within("sync_kv_timeout_ms")
            return TransferTimeout(f"{sentence}: it did not end {limit}")
        return TransferError(sentence)

    def _cluster(self, cluster_id: int, endpoint: WorkerEndpoint | None) -> Any:
        """A peer; without an address it can only be unlinked by force."""
        cluster = self._api.LLMClusterInfo()
        cluster.remote_cluster_id = cluster_id
        cluster.append_local_ip_info(self._config.host, 0)
        if endpoint is not None:
            cluster.append_remote_ip_info(endpoint.host, endpoint.engine_port)
            if endpoint.link_secret:
                cluster.link_secret = endpoint.link_secret
        return cluster

    def _link_sentence(self, endpoint: WorkerEndpoint, status: Any, detail: str) -> str:
        return _joined(
            f"link to cluster {endpoint.cluster_id:x} at "
            f"{endpoint.host}:{endpoint.engine_port} ended with {status_name(status)}",
            detail,
            self._backend.link_error(status, endpoint.cluster_id),
            f"one attempt may take {self._config.link_timeout_ms} ms (link_timeout_ms)",
        )


class PushTask:
    """A push that was started."""

    def __init__(self, task: Any, deadlines: Deadlines) -> None:
        self._task = task
        self._deadlines = deadlines

    def wait(self) -> str:
        """Wait for its end; its status by name, and the limit if its time was over. Every layer
        has a timeout in the engine."""
        name = status_name(self._task.synchronize())
        if name in _TIMEOUTS:
            limit = self._deadlines.within("sync_kv_timeout_ms")
            return f"{name}: a layer was not there {limit}"
        return name

    def layer_times(self) -> list[tuple[int, int, int]]:
        """Per region that has arrived: its index, and when its push was started and acknowledged;
        nanoseconds of the monotonic clock."""
        times = self._task.layer_times()
        return [(time.layer_index, time.started_ns, time.acknowledged_ns) for time in times]


def _joined(*parts: str) -> str:
    return ": ".join(part for part in parts if part)
