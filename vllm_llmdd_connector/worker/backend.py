"""What differs between the implementations of the LLM-DataDist API, behind one small interface.

``HostBackend`` is our own engine and its extensions; the vendor's package is ``AscendBackend`` of
``datadist/ascend.py``. ``DataDistEngine`` holds what both do alike. Called on the worker's main
thread, except ``link``, ``unlink`` and their errors' words, which belong to a peer's
thread.
"""

import contextlib
import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol, cast

from vllm_llmdd_connector.config import ConnectorConfig
from vllm_llmdd_connector.errors import ConfigError
from vllm_llmdd_connector.layout.kv_layout import CachePlan

HOST_API = "vllm_llmdd_connector.datadist"
ASCEND_BACKEND = "vllm_llmdd_connector.datadist.ascend"
NPU = "npu"


class Fence(Protocol):
    """A point in the device's work; any thread may ask it."""

    def wait(self) -> None:
        """Return when all work that was queued before it is done."""

    def is_done(self) -> bool:
        """Whether ``wait`` would return at once."""


class LayerTransfers(Protocol):
    """A backend's transfer of all layers in one call."""

    def transfer_layers(
        self,
        src_cache: Any,
        dst_key: Any,
        num_layers: int,
        src_blocks: list[int],
        dst_blocks: list[int],
        wait_for_layer: Callable[[int], bool],
    ) -> tuple[int, Any]:
        """One ``transfer_cache_async`` of all layers to one peer, and its end.

        ``wait_for_layer`` is called on a thread of the engine and may end the transfer by False.
        Returns how many layers have arrived, all or the first ones, and the status; that of a
        transfer which ``wait_for_layer`` has ended is success.
        """


class Backend(Protocol):
    """One implementation of the API, started once per worker rank."""

    api: Any
    """The module with the LLM-DataDist names."""
    listen_port: int
    """The port that peers' ``link_clusters`` dials; 0 when this side does not listen."""
    link_secret: str
    """What they must know to link over NIXL; empty where there is no such thing."""
    max_blocks_per_call: int
    """Longer block lists are pulled and pushed in pieces."""
    has_reservations: bool
    """Whether blocks can be set aside for a peer's pushes, an extension of the API. Without them
    P names D's blocks, and writes them until it says that it does not."""

    @property
    def layer_transfers(self) -> LayerTransfers | None:
        """For the tensors at hand; None where blocks are pushed a layer at a time."""

    @property
    def can_push(self) -> bool:
        """Whether this installation, which has been started, can push."""

    def check_plans(self, plans: Sequence[CachePlan]) -> None:
        """Refuse with ``ConfigError`` what cannot be registered."""

    def start(self, cluster_id: int, is_producer: bool) -> Any:
        """The running ``LLMDataDist``; it listens, and is read from, if ``is_producer``.

        Raises:
            ConfigError: says what to change.
        """

    def placement(self) -> dict[str, Any]:
        """Arguments of ``CacheDesc`` that say where the KV tensors are."""

    def link(self, cluster: Any) -> Any:
        """The status of one ``link_clusters``; returns within ``link_timeout_ms`` and a margin.

        Raises:
            LinkError: the call itself did not return in time.
        """

    def unlink(self, cluster: Any) -> None:
        """Drop the local end of a link."""

    def link_error(self, status: Any, cluster_id: int) -> str:
        """Why the last link to this cluster ended so, and what to do about it."""

    def remedy(self, status: Any) -> str:
        """What to do about this status of another call; empty if the exception's text says it."""

    def record_fence(self) -> Fence | None:
        """The device's work up to now, on the calling thread's stream; None where there is none."""

    def on_link(self, cluster_id: int) -> AbstractContextManager[None]:
        """Around a pull or a push: keeps others away from the link, where they may not be."""

    def stop(self) -> None:
        """Finalize; no transfer may run."""


def load_api(engine: str) -> ModuleType:
    """Our own module with the LLM-DataDist names.

    Raises:
        ConfigError: its native part is not usable here.
    """
    try:
        return importlib.import_module(HOST_API)
    except ImportError as error:
        raise ConfigError(
            f"engine {engine!r} needs the native part of {HOST_API}, which cannot be imported: "
            f"{error}; reinstall vllm-llmdd-connector on this machine"
        ) from None


def choose_backend(config: ConnectorConfig, kv_caches: Mapping[str, Any]) -> Backend:
    """The backend for option ``engine`` and the device of the KV tensors.

    Raises:
        ConfigError: that engine cannot move these tensors, or is not installed.
    """
    layer, device = _common_device(kv_caches)
    on_npu = device.type == NPU
    if config.engine == "ascend" or (config.engine == "auto" and on_npu):
        if device.type not in ("cpu", NPU):
            raise ConfigError(
                f"KV cache of layer {layer} is on device {device}, but engine 'ascend' moves NPU "
                "and host memory only; use a connector for that device"
            )
        if config.transport != "auto":
            raise ConfigError(
                f"transport is {config.transport!r}, but engine 'ascend' moves bytes by itself; "
                "leave transport out or set it to 'auto'"
            )
        if on_npu and config.kv_digest:
            raise ConfigError(
                f"kv_digest reads host memory, but the KV cache is on {device}; leave kv_digest out"
            )
        if on_npu and config.integrity != "off":
            raise ConfigError(
                f"integrity {config.integrity!r} reads host memory, but the KV cache is on "
                f"{device}; leave integrity out on both servers"
            )
        module = importlib.import_module(ASCEND_BACKEND)
        return cast(Backend, module.AscendBackend(config, device))
    if device.type != "cpu":
        fix = (
            "set engine to 'ascend' or 'auto'"
            if on_npu
            else "run vLLM's CPU build, or a connector for that device"
        )
        raise ConfigError(
            f"KV cache of layer {layer} is on device {device}, but the host engine moves host "
            f"memory only; {fix}"
        )
    return HostBackend(config)


def _common_device(kv_caches: Mapping[str, Any]) -> tuple[str, Any]:
    """The one device of all KV tensors, with the first layer on it."""
    found: dict[str, tuple[str, Any]] = {}
    for layer, tensor in _tensors(kv_caches):
        found.setdefault(str(tensor.device), (layer, tensor.device))
    if not found:
        raise ConfigError("vLLM registered no KV cache; the model has nothing to transfer")
    if len(found) > 1:
        places = ", ".join(f"layer {layer} on {device}" for device, (layer, _) in found.items())
        raise ConfigError(
            f"the KV cache is spread over several devices ({places}); this connector needs one "
            "device per rank"
        )
    return next(iter(found.values()))


def _tensors(kv_caches: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for layer, value in kv_caches.items():
        for tensor in value if isinstance(value, tuple | list) else [value]:
            yield layer, tensor


class HostBackend:
    """Our own engine, with its extensions: port 0, ``listen_port``, ``last_link_error``."""

    listen_port = 0
    max_blocks_per_call = 2**31
    has_reservations = True
    can_push = True
    layer_transfers: LayerTransfers | None = None

    def __init__(self, config: ConnectorConfig) -> None:
        self.api: Any = load_api(config.engine)
        self._config = config
        self._datadist: Any = None
        self.link_secret = secrets.token_hex(16)

    def check_plans(self, plans: Sequence[CachePlan]) -> None:
        """Any address and any number of them will do."""

    def start(self, cluster_id: int, is_producer: bool) -> Any:
        api, config = self.api, self._config
        options = api.LLMConfig()
        options.enable_cache_manager = True
        options.enable_remote_cache_accessible = True
        options.sync_kv_timeout = config.sync_kv_timeout_ms
        options.transport = config.transport
        options.link_secret = self.link_secret
        options.staging_mib = config.staging_mib
        # Nobody reads from a D that is not a P, too: its KV cache need not be resident at once.
        options.share_memory = is_producer
        if is_producer:
            options.listen_ip_info = f"{config.host}:0"
        role = api.LLMRole.PROMPT if is_producer else api.LLMRole.DECODER
        datadist = api.LLMDataDist(role, cluster_id)
        try:
            datadist.init(options.generate_options())
        except api.LLMException as error:
            raise ConfigError(
                f"the LLM-DataDist engine did not start on {config.host}: {error}; "
                "set host to an address of this machine"
            ) from None
        self._datadist = datadist
        self.listen_port = int(datadist.listen_port)
        return datadist

    def placement(self) -> dict[str, Any]:
        """The default, which is this process's memory here."""
        return {}

    def link(self, cluster: Any) -> Any:
        status, _ = self._datadist.link_clusters([cluster], self._config.link_timeout_ms)
        return status

    def unlink(self, cluster: Any) -> None:
        self._datadist.unlink_clusters([cluster], self._config.link_timeout_ms, force=True)

    def link_error(self, status: Any, cluster_id: int) -> str:
        return str(self._datadist.last_link_error(cluster_id))

    def remedy(self, status: Any) -> str:
        """The text of our own exceptions says what to do."""
        return ""

    def record_fence(self) -> None:
        """Host memory: what vLLM has computed is in place when the call returns."""

    def on_link(self, cluster_id: int) -> AbstractContextManager[None]:
        """The engine orders the calls of a link by itself."""
        return contextlib.nullcontext()

    def stop(self) -> None:
        self._datadist.finalize()
