"""The connector's options, read once from ``kv_connector_extra_config``.

Every field says its meaning and unit. An unknown key or a wrong type is refused at start-up by
name.
"""

import difflib
import ipaddress
import math
from typing import Any, Literal

import msgspec

from vllm_llmdd_connector.errors import ConfigError

LOOPBACK = ("127.0.0.0/8",)


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of ``LLMDataDistConnector``."""

    host: str = "127.0.0.1"
    """IPv4 address on which this engine's control port and its workers listen, and which peers
    dial."""

    control_port: int = 0
    """TCP port of the engine's control channel; 0 picks a free one. The data parallel rank is
    added. A D listens there for the P's that a metaserver has chosen."""

    allowed_peers: tuple[str, ...] = LOOPBACK
    """IPv4 addresses and networks (CIDR) that this engine may dial when a request names them: a D
    its P and its metaserver, a P the D that asked a metaserver."""

    engine: Literal["auto", "host", "ascend"] = "auto"
    """LLM-DataDist implementation: ours on host memory, or the vendor's ``llm_datadist``; ``auto``
    goes by where the KV tensors are."""

    first_contact_timeout_s: float = 5.0
    """D: how long a new request waits for P's first answer before it is prefilled locally."""

    metaserver_timeout_s: float = 30.0
    """D: how long a request that has asked a metaserver waits for a P to get in touch."""

    request_timeout_s: float = 60.0
    """D: how long a request with blocks may wait behind other transfers; linking, copying and P's
    confirmation have bounds of their own."""

    link_timeout_ms: int = 3000
    """D: bound on linking one worker to one peer worker."""

    sync_kv_timeout_ms: int = 10000
    """Bound on one pull of one cache (LLM-DataDist's ``sync_kv_timeout``)."""

    release_timeout_s: float = 5.0
    """D: how long a worker waits for P's confirmation that the blocks it read were still held."""

    lease_s: float = 30.0
    """P: how long finished prompts' blocks are held without a sign of life from D."""

    max_lease_s: float = 300.0
    """P: bound on a lease, however often it is renewed."""

    max_leased_fraction: float = 0.5
    """P: share of the KV cache that leases may hold; beyond it a prompt is not handed over."""

    push: bool = True
    """Layer-wise push for requests whose legs share a ``transfer_id``; false: D pulls them when P
    has finished."""

    unreserved_fraction: float = 0.25
    """P: share of the KV cache that prompts may take for which no D has blocks yet; others wait for
    their D."""

    kv_digest: str = ""
    """Debug: folder for per-layer, per-block digests of sent and received KV; slow. Empty: off."""

    trace_dir: str = ""
    """Folder for traces of every transfer, one file per process; see docs/tracing.md. Empty:
    off."""

    prefill: dict[str, Any] | None = None
    """Accepted because vllm-ascend's platform code reads it; sizes are learnt from the peer."""

    decode: dict[str, Any] | None = None
    """As ``prefill``."""


OPTION_NAMES = tuple(ConnectorConfig.__struct_fields__)
_POSITIVE = (
    "first_contact_timeout_s",
    "metaserver_timeout_s",
    "request_timeout_s",
    "link_timeout_ms",
    "sync_kv_timeout_ms",
    "release_timeout_s",
    "lease_s",
    "max_lease_s",
    "max_leased_fraction",
    "unreserved_fraction",
)


def read_config(extra_config: dict[str, Any] | None) -> ConnectorConfig:
    """Check ``kv_connector_extra_config`` and return it typed.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range, named with what is
        expected.
    """
    given = dict(extra_config or {})
    for key in given:
        if key not in OPTION_NAMES:
            raise ConfigError(_unknown_key(key))
    try:
        config = msgspec.convert(given, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"kv_connector_extra_config is wrong: {error}; see docs/configuration.md"
        ) from None
    _check_values(config)
    return config


def _unknown_key(key: str) -> str:
    near = difflib.get_close_matches(str(key), OPTION_NAMES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(OPTION_NAMES)}"
    return f"kv_connector_extra_config has an unknown key {key!r}; {hint}"


def _check_values(config: ConnectorConfig) -> None:
    for name in _POSITIVE:
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}, it must be above 0; change it or leave it out")
    for name in ("max_leased_fraction", "unreserved_fraction"):
        if getattr(config, name) > 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must be in (0, 1]")
    if config.max_lease_s < config.lease_s:
        raise ConfigError(
            f"max_lease_s is {config.max_lease_s}, below lease_s {config.lease_s}; raise it"
        )
    if not 0 <= config.control_port <= 65535:
        raise ConfigError(f"control_port is {config.control_port}, it must be in [0, 65535]")
    for name in ("link_timeout_ms", "sync_kv_timeout_ms"):
        if getattr(config, name) > 2**31 - 1:
            raise ConfigError(f"{name} is {getattr(config, name)}, it must be below 2**31")
    _check_host(config.host)
    for entry in config.allowed_peers:
        _check_allowed_peer(entry)


def _check_allowed_peer(entry: str) -> None:
    try:
        ipaddress.IPv4Network(entry, strict=False)
    except ValueError:
        raise ConfigError(
            f"allowed_peers has {entry!r}, expected an IPv4 address or a network like 10.0.0.0/8"
        ) from None


def _check_host(host: str) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(
            f"host is {host!r}, it must be an IP address of this machine that peers can dial"
        ) from None
    if address.version != 4:
        raise ConfigError(
            f"host is {host!r}, but the engine speaks IPv4 only; name an IPv4 address"
        )
    if address.is_unspecified:
        raise ConfigError(
            f"host is {host!r}, which peers cannot dial; name one address of this machine"
        )


def is_allowed_peer(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether this engine may contact ``host``: an IPv4 literal inside one of ``allowed``."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return any(address in ipaddress.IPv4Network(entry, strict=False) for entry in allowed)
