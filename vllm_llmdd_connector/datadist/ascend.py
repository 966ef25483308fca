"""The vendor's ``llm_datadist`` package (CANN 8.3 to 9.2) behind the connector's ``Backend``.

``worker/backend.py`` chooses it. It needs ``import llm_datadist`` to work, and ``torch_npu`` only
for tensors that live on an NPU. What the vendor would report with a bare status code, or not at
all, is checked here first; every workaround for the vendor is in this file. Facts about the package
are from its documentation and sources; none of this has run on an NPU.

The second-generation ``CacheManager`` with remote access is used, linked by ``link_clusters``: one
side listens, the other dials, and the dialling side copies without the listening one's help.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_llmdd_connector.datadist.vendor_calls import LinksInUse, VendorCall
from vllm_llmdd_connector.datadist.vendor_status import remedy
from vllm_llmdd_connector.deadlines import LINK_MARGIN_MS
from vllm_llmdd_connector.errors import ConfigError, LinkError, status_name
from vllm_llmdd_connector.log import get_logger

if TYPE_CHECKING:
    from vllm_llmdd_connector.config import ConnectorConfig
    from vllm_llmdd_connector.layout.kv_layout import CachePlan
    from vllm_llmdd_connector.worker.backend import LayerTransfers

__all__ = ["AscendBackend", "NpuFence", "load_vendor"]

logger = get_logger(__name__)

MAX_ADDRESSES = 240
"""Registered addresses of one process, over all caches."""
ALIGNMENT = 2 << 20
"""Of an NPU tensor's address; HCCS needs it."""
LISTEN_ATTEMPTS = 5

_NAMES = (
    "BlocksCacheKey",
    "CacheDesc",
    "DataType",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "Placement",
)
_LAYER_NAMES = ("LayerSynchronizer", "TransferWithCacheKeyConfig")
_OPTIONS = (
    "device_id",
    "enable_cache_manager",
    "enable_remote_cache_accessible",
    "listen_ip_info",
    "local_comm_res",  # not used: it came with the link_clusters that is, in CANN 8.3
    "sync_kv_timeout",
)
_INSTALL = "install the CANN toolkit, 8.3 to 9.2, and source its set_env.sh before vLLM starts"


def load_vendor() -> ModuleType:
    """The module ``llm_datadist``.

    Raises:
        ConfigError: it is not installed, or too old.
    """
    try:
        module = importlib.import_module("llm_datadist")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"engine 'ascend' needs the vendor's package llm_datadist, which cannot be imported: "
            f"{error}; {_INSTALL}, or use engine 'host' for KV cache in host memory"
        ) from None
    missing = [name for name in _NAMES if not hasattr(module, name)]
    if "LLMConfig" not in missing:
        missing += [f"LLMConfig.{name}" for name in _OPTIONS if not hasattr(module.LLMConfig, name)]
    if missing:
        raise ConfigError(
            f"llm_datadist in {getattr(module, '__file__', 'memory')} has no {', '.join(missing)}: "
            f"it is not of CANN 8.3 to 9.2; {_INSTALL}"
        )
    return module


class NpuFence:
    """All work queued on the device's current stream when it was made."""

    def __init__(self, npu: Any, device_index: int) -> None:
        self._npu = npu
        self._device_index = device_index
        self._event = npu.Event()
        self._event.record()

    def wait(self) -> None:
        self._npu.set_device(self._device_index)
        self._event.synchronize()

    def is_done(self) -> bool:
        self._npu.set_device(self._device_index)
        return bool(self._event.query())


class AscendBackend:
    """The vendor's engine of one worker rank, for KV tensors on ``device``."""

    # A request of this mode has room for about 131,000 entries, two for each run of blocks.
    max_blocks_per_call = 32768
    has_reservations = False

    def __init__(self, config: ConnectorConfig, device: Any) -> None:
        self.api: Any = load_vendor()
        self.listen_port = 0
        self.link_secret = ""
        self._config = config
        self._on_npu = device.type == "npu"
        self._npu: Any = None
        self._device_index = device.index
        if self._on_npu:
            self._npu = _load_npu()
            if self._device_index is None:
                self._device_index = self._npu.current_device()
        self._datadist: Any = None
        self._link_calls: dict[int, VendorCall] = {}
        self._links = LinksInUse()
        # Its checks refuse a source in host memory; those of push_blocks do not look at it.
        self._takes_layers = self._on_npu and all(hasattr(self.api, name) for name in _LAYER_NAMES)

    @property
    def layer_transfers(self) -> LayerTransfers | None:
        return self if self._takes_layers else None

    @property
    def can_push(self) -> bool:
        return hasattr(self._datadist.cache_manager, "push_blocks")

    def check_plans(self, plans: Sequence[CachePlan]) -> None:
        """Refuse what the vendor would: addresses by number and by alignment."""
        num_addresses = sum(len(plan.regions) for plan in plans)
        if num_addresses > MAX_ADDRESSES:
            raise ConfigError(
                f"the KV cache of this rank has {num_addresses} tensors to register, but "
                f"llm_datadist takes {MAX_ADDRESSES} addresses per process; use a KV cache layout "
                "with fewer tensors per layer, or another connector for this model"
            )
        if not self._on_npu:
            logger.warning(
                "the KV cache is in host memory: llm_datadist wants page-locked memory for RDMA; "
                "engine 'host' is the one for vLLM's CPU build"
            )
            return
        for plan in plans:
            for region in plan.regions:
                if region.base % ALIGNMENT:
                    raise ConfigError(
                        f"KV tensor of layer {region.name} begins at {region.base:#x}, which is no "
                        f"multiple of {ALIGNMENT} (2 MiB), as llm_datadist needs it; use a "
                        "vLLM-Ascend that aligns KV tensors when --kv-transfer-config is given"
                    )

    def start(self, cluster_id: int, is_producer: bool) -> Any:
        """The package cannot pick a port and tell it, so a free one is chosen here; if somebody
        takes it in between, another one is."""
        host = self._config.host
        for _ in range(LISTEN_ATTEMPTS if is_producer else 1):
            port = _free_port(host) if is_producer else 0
            try:
                self._datadist = self._init(cluster_id, port)
            except self.api.LLMException as error:
                if port and _is_failed(error) and not _is_free(host, port):
                    logger.info("%s:%d was taken by another process; next port", host, port)
                    continue
                raise ConfigError(self._start_sentence(error)) from None
            self.listen_port = port
            return self._datadist
        raise ConfigError(
            f"llm_datadist could not listen on {host}: {LISTEN_ATTEMPTS} free ports in a row were "
            "taken by others; widen net.ipv4.ip_local_port_range"
        )

    def placement(self) -> dict[str, Any]:
        places = self.api.Placement
        return {"placement": places.DEVICE if self._on_npu else places.HOST}

    def link(self, cluster: Any) -> Any:
        """The vendor's call waits without end for a peer that accepts and says nothing, so it runs
        in a thread of its own, which is left behind then."""
        cluster_id, timeout_ms = cluster.remote_cluster_id, self._config.link_timeout_ms
        if self._is_linking(cluster_id):
            raise LinkError(
                f"cluster {cluster_id:x} does not answer: an earlier attempt to link it still "
                "waits inside llm_datadist; see whether its process is stopped or another program "
                "listens at its address"
            )
        call = VendorCall(lambda: self._datadist.link_clusters([cluster], timeout_ms))
        self._link_calls[cluster_id] = call
        if not call.wait((timeout_ms + LINK_MARGIN_MS) / 1000):
            raise LinkError(
                f"cluster {cluster_id:x} accepted the connection but did not answer within "
                f"{timeout_ms + LINK_MARGIN_MS} ms; see whether its process is stopped or another "
                "program listens at its address"
            )
        del self._link_calls[cluster_id]
        status, _ = call.result()
        return status

    def unlink(self, cluster: Any) -> None:
        """This end only: the other one may be dead, and telling it has no bound."""
        cluster_id = cluster.remote_cluster_id
        if self._is_linking(cluster_id):
            return
        with self._links.use(cluster_id):
            self._datadist.unlink_clusters([cluster], self._config.link_timeout_ms, force=True)

    def link_error(self, status: Any, cluster_id: int) -> str:
        return remedy(status)

    def remedy(self, status: Any) -> str:
        return remedy(status)

    def record_fence(self) -> NpuFence | None:
        return NpuFence(self._npu, self._device_index) if self._on_npu else None

    def on_link(self, cluster_id: int) -> AbstractContextManager[None]:
        """Pulls, pushes and unlinking exclude each other on a link."""
        return self._links.use(cluster_id)

    def transfer_layers(
        self,
        src_cache: Any,
        dst_key: Any,
        num_layers: int,
        src_blocks: list[int],
        dst_blocks: list[int],
        wait_for_layer: Callable[[int], bool],
    ) -> tuple[int, Any]:
        """Keeps clear of three faults of the package.

        A destination range is read by the source's layer number, right only from layer 0 on: so
        all layers, always. Results are stored by cluster, the last one for all of its configs: so
        one config. A synchronizer that raises ends the package's thread without a word and with
        success: so none raises, and only a result that is there counts.
        """
        layers = range(num_layers)
        gate = _Gate(wait_for_layer)
        task = self._datadist.cache_manager.transfer_cache_async(
            src_cache,
            gate.as_synchronizer(self.api),
            [self.api.TransferWithCacheKeyConfig(dst_key, layers, layers)],
            src_blocks,
            dst_blocks,
        )
        status = task.synchronize()
        (result,) = task.get_results()
        if gate.refused is not None:
            # It asks for a layer only when all those before it have arrived.
            return gate.refused, self.api.LLMStatusCode.LLM_SUCCESS
        if result is None:
            status = self.api.LLMStatusCode.LLM_FAILED
        return num_layers, status

    def stop(self) -> None:
        """Not beside a call that still waits inside the package: it may not be finalized then."""
        is_linking = any(self._is_linking(cluster_id) for cluster_id in list(self._link_calls))
        if is_linking or self._links.any_in_use():
            logger.warning("llm_datadist is not finalized: it still waits for a peer's answer")
            return
        self._datadist.finalize()

    def _is_linking(self, cluster_id: int) -> bool:
        call = self._link_calls.get(cluster_id)
        if call is not None and call.wait(0):
            del self._link_calls[cluster_id]
            return False
        return call is not None

    def _init(self, cluster_id: int, port: int) -> Any:
        api = self.api
        options = api.LLMConfig()
        if self._on_npu:
            options.device_id = self._device_index
        options.enable_cache_manager = True
        options.enable_remote_cache_accessible = True
        options.sync_kv_timeout = self._config.sync_kv_timeout_ms
        if port:
            options.listen_ip_info = f"{self._config.host}:{port}"
        datadist = api.LLMDataDist(api.LLMRole.PROMPT if port else api.LLMRole.DECODER, cluster_id)
        try:
            datadist.init(options.generate_options())
        except Exception:
            # Whatever a failed start leaves behind must not stand in the next one's way.
            with contextlib.suppress(Exception):
                datadist.finalize()
            raise
        return datadist

    def _start_sentence(self, error: Any) -> str:
        where = f"NPU {self._device_index}" if self._on_npu else "host memory"
        return (
            f"llm_datadist did not start on {self._config.host} with {where}, "
            f"{status_name(error.status_code)}: {error}: {remedy(error.status_code)}"
        )


class _Gate:
    """A ``LayerSynchronizer`` that never raises, and remembers where it has said no."""

    def __init__(self, wait_for_layer: Callable[[int], bool]) -> None:
        self._wait_for_layer = wait_for_layer
        self.refused: int | None = None

    def as_synchronizer(self, api: Any) -> Any:
        """Of the package's own class: it takes nothing else."""

        def synchronize_layer(_: object, layer_index: int, timeout_in_millis: int | None) -> bool:
            return self._ask(layer_index)

        methods = {"synchronize_layer": synchronize_layer}
        return type("LayerGate", (api.LayerSynchronizer,), methods)()

    def _ask(self, layer_index: int) -> bool:
        try:
            is_computed = self._wait_for_layer(layer_index)
        except Exception:
            logger.exception("waiting for layer %d of a push failed", layer_index)
            return False
        if not is_computed:
            self.refused = layer_index
        return is_computed


def _load_npu() -> Any:
    try:
        return importlib.import_module("torch_npu").npu
    except ImportError as error:
        raise ConfigError(
            f"the KV cache is on an NPU, but torch_npu cannot be imported: {error}; install the "
            "torch_npu that fits your torch and CANN"
        ) from None


def _is_failed(error: Any) -> bool:
    return status_name(error.status_code) == "LLM_FAILED"


def _free_port(host: str) -> int:
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}: {error}; set host to an address of this machine"
        ) from None


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.socket() as probe:
            probe.bind((host, port))
    except OSError:
        return False
    return True
