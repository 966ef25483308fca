"""Types of what the fixtures of ``conftest`` give."""

from __future__ import annotations

from collections.abc import Callable

from contract.cluster import Cluster
from contract.first_cluster import FirstCluster
from contract.peer import Peer

__all__ = ["Linked", "MakeFirst", "MakeLocal", "MakePeer", "Pair"]

Pair = Callable[..., tuple[Cluster, Peer]]
MakeLocal = Callable[..., Cluster]
MakePeer = Callable[..., Peer]
MakeFirst = Callable[..., FirstCluster]
Linked = tuple[FirstCluster, Peer]
