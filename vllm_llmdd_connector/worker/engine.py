"""One worker's LLM-DataDist instance: registration, links and pulls, with errors in words.

The only file of the connector that calls the LLM-DataDist API.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.control.messages import WorkerEndpoint
from vllm_llmdd_connector.errors import ConfigError, LinkError, TransferError, TransferTimeout
from vllm_llmdd_connector.layout.kv_layout import CachePlan
from vllm_llmdd_connector.log import get_logger

logger = get_logger(__name__)

HOST_API = "vllm_llmdd_connector.datadist"
VENDOR_API = "llm_datadist"


def load_api(name: str) -> ModuleType:
    """The module with the LLM-DataDist names for the ``engine`` option.

    Raises:
        ConfigError: the engine is not available here; says what to install or choose.
    """
    if name == "ascend":
        raise ConfigError(
            "engine 'ascend' is not supported by this version of the connector; use engine 'host' "
            "for KV cache in host memory"
        )
    try:
        return importlib.import_module(HOST_API)
    except ImportError as error:
        raise ConfigError(
            f"engine {name!r} needs the native part of {HOST_API}, which cannot be imported: "
            f"{error}; reinstall vllm-llmdd-connector on this machine"
        ) from None


class DataDistEngine:
    """The LLM-DataDist life of one worker rank."""

    def __init__(
        self,
        config: ConnectorConfig,
        cluster_id: int,
        plans: list[CachePlan],
        is_producer: bool,
    ) -> None:
        self._api = load_api(config.engine)
        self._config = config
        self.cluster_id = cluster_id
        self._datadist = self._start(is_producer)
        self._caches = [self._register(plan) for plan in plans]

    @property
    def listen_port(self) -> int:
        """The port that peers' ``link_clusters`` dials."""
        return int(self._datadist.listen_port)

    def link(self, endpoint: WorkerEndpoint) -> None:
        """Link one peer worker; blocks for ``link_timeout_ms`` at most.

        Raises:
            LinkError: names the peer and what the engine says.
        """
        cluster = self._cluster(endpoint)
        try:
            status, _ = self._datadist.link_clusters([cluster], self._config.link_timeout_ms)
        except self._api.LLMException as error:
            raise LinkError(self._link_sentence(endpoint, error.status_code, str(error))) from None
        if status != self._api.LLMStatusCode.LLM_SUCCESS:
            detail = self._datadist.last_link_error(endpoint.cluster_id)
            raise LinkError(self._link_sentence(endpoint, status, detail))

    def unlink(self, endpoint: WorkerEndpoint) -> None:
        """Forget a link on this side, whatever state it is in."""
        cluster = self._cluster(endpoint)
        try:
            self._datadist.unlink_clusters([cluster], self._config.link_timeout_ms, force=True)
        except (self._api.LLMException, RuntimeError) as error:
            logger.debug("cluster %x: unlink: %s", endpoint.cluster_id, error)

    def pull(
        self, peer_cluster_id: int, plan: CachePlan, src_blocks: list[int], dst_blocks: list[int]
    ) -> None:
        """Copy blocks of the peer's cache into ours; returns when they are there.

        Raises:
            TransferTimeout, TransferError: name the cache, the peer and the engine's status.
        """
        key = self._api.BlocksCacheKey(peer_cluster_id, plan.model_id)
        try:
            self._datadist.cache_manager.pull_blocks(
                key,
                self._caches[plan.model_id],
                src_blocks,
                dst_blocks,
                tensor_num_per_layer=1,
            )
        except self._api.LLMException as error:
            sentence = (
                f"pull_blocks of {len(src_blocks)} blocks of cache {plan.model_id} from cluster "
                f"{peer_cluster_id:x} ended with {error.status_code.name}: {error}"
            )
            if error.status_code == self._api.LLMStatusCode.LLM_TIMEOUT:
                raise TransferTimeout(sentence) from None
            raise TransferError(sentence) from None

    def close(self) -> None:
        """Give everything back; no transfer may run."""
        self._datadist.finalize()

    def _start(self, is_producer: bool) -> Any:
        api = self._api
        options = api.LLMConfig()
        options.enable_cache_manager = True
        options.enable_remote_cache_accessible = True
        options.sync_kv_timeout = self._config.sync_kv_timeout_ms
        if is_producer:
            options.listen_ip_info = f"{self._config.host}:0"
        role = api.LLMRole.PROMPT if is_producer else api.LLMRole.DECODER
        datadist = api.LLMDataDist(role, self.cluster_id)
        try:
            datadist.init(options.generate_options())
        except api.LLMException as error:
            raise ConfigError(
                f"the LLM-DataDist engine did not start on {self._config.host}: {error}; "
                "set host to an address of this machine"
            ) from None
        return datadist

    def _register(self, plan: CachePlan) -> Any:
        api = self._api
        desc = api.CacheDesc(
            len(plan.regions), [plan.num_blocks, plan.block_len], api.DataType.DT_UINT8
        )
        key = api.BlocksCacheKey(self.cluster_id, plan.model_id)
        addresses = [region.base for region in plan.regions]
        return self._datadist.cache_manager.register_blocks_cache(
            desc, addresses, key, remote_accessible=True
        )

    def _cluster(self, endpoint: WorkerEndpoint) -> Any:
        cluster = self._api.LLMClusterInfo()
        cluster.remote_cluster_id = endpoint.cluster_id
        cluster.append_local_ip_info(self._config.host, 0)
        cluster.append_remote_ip_info(endpoint.host, endpoint.engine_port)
        return cluster

    def _link_sentence(self, endpoint: WorkerEndpoint, status: Any, detail: str) -> str:
        name = getattr(status, "name", status)
        return (
            f"link to cluster {endpoint.cluster_id:x} at "
            f"{endpoint.host}:{endpoint.engine_port} ended with {name}: {detail}"
        )
