"""How a peer's cache is named."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_llmdd_connector.datadist.checks import (
    check,
    check_int64,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.status import fail

__all__ = ["INVALID_ID", "BlocksCacheKey", "CacheKey", "CacheKeyByIdAndIndex"]

#: A req_id or prefix_id that names nothing.
INVALID_ID = 2**64 - 1

_CLUSTER = "cluster_id"
_CLUSTER_ALIAS = "prompt_cluster_id"


def _bind(
    kind: str,
    names: tuple[str, ...],
    required: int,
    args: tuple[int, ...],
    kwargs: Mapping[str, int],
) -> dict[str, int]:
    """Arguments by name; the cluster goes by either of its two names, so no signature fits."""
    check(len(args) + len(kwargs) <= len(names), f"{kind} takes at most {len(names)} parameters")
    bound = dict(zip(names, args, strict=False))
    for given, value in kwargs.items():
        name = _CLUSTER if given == _CLUSTER_ALIAS else given
        check(name in names, f"{kind} has no parameter {given!r}")
        check(name not in bound, f"{kind} got {name} twice")
        bound[name] = value
    for name in names[:required]:
        if name not in bound:
            fail(f"{kind} needs {name}")
    return bound


class CacheKey:
    """One row of a contiguous cache by request or by prefix.

    Parameters in order: ``cluster_id`` (or ``prompt_cluster_id``), ``req_id``, ``model_id=0``,
    ``prefix_id=INVALID_ID``. A key names a prefix when ``prefix_id`` is given.
    """

    def __init__(self, *args: int, **kwargs: int) -> None:
        names = (_CLUSTER, "req_id", "model_id", "prefix_id")
        bound = _bind("CacheKey", names, 2, args, kwargs)
        for name, value in bound.items():
            check_uint64(name, value)
        self._cluster_id = bound[_CLUSTER]
        self._req_id = bound["req_id"]
        self._model_id = bound.get("model_id", 0)
        self._prefix_id = bound.get("prefix_id", INVALID_ID)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        return self._cluster_id

    @property
    def req_id(self) -> int:
        return self._req_id

    @property
    def model_id(self) -> int:
        return self._model_id

    @property
    def prefix_id(self) -> int:
        return self._prefix_id

    def _fields(self) -> tuple[int, ...]:
        return (self._cluster_id, self._req_id, self._model_id, self._prefix_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, "
            f"model_id={self._model_id}, prefix_id={self._prefix_id})"
        )


class BlocksCacheKey:
    """A blocks cache by model. Parameters: ``cluster_id`` (or its alias), ``model_id=0``."""

    def __init__(self, *args: int, **kwargs: int) -> None:
        bound = _bind("BlocksCacheKey", (_CLUSTER, "model_id"), 1, args, kwargs)
        for name, value in bound.items():
            check_type(name, value, int)
        self._cluster_id = bound[_CLUSTER]
        self._model_id = bound.get("model_id", 0)

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        return self._cluster_id

    @property
    def model_id(self) -> int:
        return self._model_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlocksCacheKey) and (self._cluster_id, self._model_id) == (
            other._cluster_id,
            other._model_id,
        )

    def __hash__(self) -> int:
        return hash((self._cluster_id, self._model_id))

    def __repr__(self) -> str:
        return f"BlocksCacheKey(cluster_id={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex:
    """One row of a cache by the cache's id in its own process."""

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        check_uint64("cluster_id", cluster_id)
        check_int64("cache_id", cache_id)
        check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    @property
    def cluster_id(self) -> int:
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        return self._cache_id

    @property
    def batch_index(self) -> int:
        return self._batch_index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKeyByIdAndIndex) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def _fields(self) -> tuple[int, int, int]:
        return (self._cluster_id, self._cache_id, self._batch_index)

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )
