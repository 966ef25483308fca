"""The address of a peer, as ``link_clusters`` takes it."""

from __future__ import annotations

import socket
import struct

from vllm_llmdd_connector.datadist.checks import check_type, check_uint16, check_uint64
from vllm_llmdd_connector.datadist.types import LLMRole

__all__ = ["LLMClusterInfo", "ip_text", "trans_str_ip"]


def trans_str_ip(ip: str | int) -> int:
    """A dotted IPv4 address as the API's integer: its bytes read little-endian. An int stays."""
    check_type("ip", ip, str, int)
    if isinstance(ip, int):
        return ip
    try:
        (number,) = struct.unpack("<I", socket.inet_pton(socket.AF_INET, ip))
    except OSError:
        raise RuntimeError(f"{ip!r} is not an IPv4 address") from None
    return int(number)


def ip_text(ip: int) -> str:
    """The dotted form of the API's integer."""
    return socket.inet_ntop(socket.AF_INET, struct.pack("<I", ip & 0xFFFFFFFF))


class LLMClusterInfo:
    """One peer: its cluster id, its listen address, and this side's own address."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local: list[tuple[int, int]] = []
        self._remote: list[tuple[int, int]] = []
        self.link_secret = ""
        """That of the peer's ``LLMConfig``, for a link over NIXL. An extension of the vendor's
        API."""

    @property
    def remote_cluster_id(self) -> int | None:
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        check_uint64("remote_cluster_id", remote_cluster_id)
        self._remote_cluster_id = remote_cluster_id

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: LLMRole | int) -> None:
        check_type("remote_role_type", remote_role_type, LLMRole, int)
        self._remote_role_type = remote_role_type

    @property
    def local_ip_info_list(self) -> list[tuple[int, int]]:
        return self._local

    @property
    def remote_ip_info_list(self) -> list[tuple[int, int]]:
        return self._remote

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        check_uint16("port", port)
        self._local.append((trans_str_ip(ip), port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        check_uint16("port", port)
        self._remote.append((trans_str_ip(ip), port))
