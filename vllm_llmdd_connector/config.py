"""The connector's options, read once from ``kv_connector_extra_config``.

Every field says its meaning and unit. An unknown key or a wrong type is refused at start-up by
name.
"""

import difflib
import ipaddress
from typing import Any, Literal

import msgspec

from vllm_llmdd_connector.deadlines import Deadlines, check_deadlines
from vllm_llmdd_connector.errors import ConfigError

LOOPBACK = ("127.0.0.0/8",)
MAX_PORT = 65535
MIN_STAGING_MIB, MAX_STAGING_MIB = 8, 4096


class ConnectorConfig(Deadlines, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config`` of ``LLMDataDistConnector``; the time limits are inherited."""

    host: str = "127.0.0.1"
    """IPv4 address on which this engine's control port and its workers listen, and which peers
    dial."""

    control_port: int = 0
    """TCP port of the engine's control channel; 0 picks a free one. The data parallel rank is
    added. A D listens there for the P's that a metaserver has chosen."""

    allowed_peers: tuple[str, ...] = LOOPBACK
    """IPv4 addresses and networks (CIDR) that this engine may dial when a request names them: a D
    its P and its metaserver, a P the D that asked a metaserver."""

    keys_dir: str = ""
    """Folder with the cluster's key set, made by ``llmdd keys``: only servers that have it talk to
    each other on the control channel, encrypted. Empty: no keys, for loopback."""

    allow_plaintext: bool = False
    """Start without keys on an address that other machines can reach."""

    engine: Literal["auto", "host", "ascend"] = "auto"
    """LLM-DataDist implementation: ours on host memory, or the vendor's ``llm_datadist``; ``auto``
    goes by where the KV tensors are."""

    transport: Literal["auto", "shm", "cma", "nixl"] = "auto"
    """Host engine: how D reads P's memory. Shared pages or cross-memory attach within a host, or
    NIXL; ``auto`` shares pages where that is possible, and takes NIXL to peers on other hosts."""

    staging_mib: int = 64
    """Memory in MiB that each link over NIXL takes for arriving bytes."""

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

    integrity: Literal["off", "sample", "full"] = "off"
    """Checksums of transferred blocks, computed at P and compared at D before a request decodes: of
    none, of one block in 16 and the last one, or of all. The same on both sides."""

    trace_dir: str = ""
    """Folder for traces of every transfer, one file per process; see docs/tracing.md. Empty:
    off."""

    prefill: dict[str, Any] | None = None
    """Accepted because vllm-ascend's platform code reads it; sizes are learnt from the peer."""

    decode: dict[str, Any] | None = None
    """As ``prefill``."""


OPTION_NAMES = tuple(ConnectorConfig.__struct_fields__)


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
    check_deadlines(config)
    for name in ("max_leased_fraction", "unreserved_fraction"):
        value = getattr(config, name)
        if not 0 < value <= 1:
            raise ConfigError(f"{name} is {value}, it must be in (0, 1]")
    if not MIN_STAGING_MIB <= config.staging_mib <= MAX_STAGING_MIB:
        raise ConfigError(
            f"staging_mib is {config.staging_mib}, it must be in "
            f"[{MIN_STAGING_MIB}, {MAX_STAGING_MIB}]"
        )
    if not 0 <= config.control_port <= MAX_PORT:
        raise ConfigError(f"control_port is {config.control_port}, it must be in [0, {MAX_PORT}]")
    _check_host(config.host)
    _check_keys(config)
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


def _check_keys(config: ConnectorConfig) -> None:
    if config.keys_dir or config.allow_plaintext or is_allowed_peer(config.host, LOOPBACK):
        return
    raise ConfigError(
        f"host is {config.host}, which other machines can reach, and keys_dir is empty: make keys "
        "with `llmdd keys DIR` and name the folder on every server, or set allow_plaintext to true "
        "where only your own servers can reach this address"
    )


def is_allowed_peer(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether this engine may contact ``host``: an IPv4 literal inside one of ``allowed``."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return any(address in ipaddress.IPv4Network(entry, strict=False) for entry in allowed)
