"""What several tests do with clusters, and the questions they ask."""

from __future__ import annotations

import threading
from typing import Any

from contract.cluster import Cluster
from contract.engines import is_vendor
from contract.errors import wait_until
from contract.memory import block_pieces, moved
from contract.peer import Peer

__all__ = [
    "MEMBERS",
    "MIB",
    "BackgroundPull",
    "by_key",
    "join",
    "large_source",
    "link_later",
    "names",
    "pull_works",
    "pulls",
    "wait_for_comm",
]

MEMBERS = {1: 0, 2: 1}
MIB = 1 << 20


def pulls(local: Cluster, key: Any, cache: int, **options: Any) -> bool:
    """Whether a pull by this key works; the only other outcome is that nothing is there."""
    try:
        local.pull_cache(key, cache, **options)
    except local.api.LLMException as error:
        if error.status_code.name == "LLM_KV_CACHE_NOT_EXIST":
            return False
        raise
    return True


def pull_works(local: Cluster, peer: Any, cache: int, source: int) -> bool:
    """Pull a block that differs, and compare."""
    local.flip_byte(cache, 0, 3)
    before = local.dump(cache)
    local.pull_blocks(local.api.BlocksCacheKey(peer.cluster_id), cache, [0], [0])
    return local.dump(cache) == moved(before, peer.dump(source), block_pieces([0], [0], 64))


def link_later(local: Cluster, peer: Peer) -> None:
    """Link, at once or when the first call needs it.

    The vendor's engine wants memory registered before, so there the test may go on with that.
    """

    def link() -> None:
        status = local.link(peer.cluster_id, peer.listen_port)
        assert status.name == "LLM_SUCCESS", local.link_error(peer.cluster_id)

    local.pending_links.append(link)
    peer.before_traffic = local.connect
    if not is_vendor(local.api):
        local.connect()


def names(task: Any) -> list[str | None]:
    """The results of a layer-wise transfer once it has ended."""
    return [None if status is None else status.name for status in task.get_results()]


def by_key(local: Cluster, layers: int, token: int | None = None, cluster_id: int = 2) -> Any:
    """All layers go to the same layers of the peer's blocks cache."""
    key = local.api.BlocksCacheKey(cluster_id)
    return local.api.TransferWithCacheKeyConfig(key, range(layers), range(layers), token=token)


def wait_for_comm(cluster: Cluster | Peer, comm_id: int, status: str) -> None:
    wait_until(lambda: cluster.comm_status(comm_id) != "PREPARING")
    assert cluster.comm_status(comm_id) == status


def join(name: str, members: dict[int, int], *clusters: Cluster | Peer) -> list[int]:
    """All clusters link; returns their comm ids once all are OK."""
    comm_ids = [cluster.link_members(name, members) for cluster in clusters]
    for cluster, comm_id in zip(clusters, comm_ids, strict=True):
        wait_for_comm(cluster, comm_id, "OK")
    return comm_ids


class BackgroundPull:
    """A pull of many gigabytes into two megabytes: the same block again and again.

    `wait_until_copying` returns when the first block has arrived.
    """

    def __init__(self, local: Cluster, pairs: int = 20_000, start: bool = True) -> None:
        self._pairs = pairs
        self._local = local
        self._cache = local.add_blocks(tensors=1, blocks=2, block_bytes=MIB, seed=1)
        self._old = local.dump(self._cache)[0][:MIB]
        self._thread = threading.Thread(target=self._run)
        self.error: Any = None
        if start:
            self.start()

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        # Alternating blocks, so that no two pairs make one run.
        dst = [0, 1] * (self._pairs // 2)
        try:
            self._local.pull_blocks(self._local.api.BlocksCacheKey(2), self._cache, dst, dst)
        except self._local.api.LLMException as error:
            self.error = error

    def wait_until_copying(self) -> None:
        memory = self._local.tensors[self._cache][0]
        while memory.byte(MIB - 1) == self._old[MIB - 1] and self._thread.is_alive():
            pass
        assert self._thread.is_alive()

    def status(self) -> str:
        self._thread.join()
        assert self.error is not None
        return str(self.error.status_code.name)

    @property
    def cache_id(self) -> int:
        return self._cache

    def dump(self) -> list[bytes]:
        return self._local.dump(self._cache)


def large_source(peer: Peer) -> int:
    return int(peer.add_blocks(tensors=1, blocks=2, block_bytes=MIB, seed=50))
