"""Types of layer-wise transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vllm_llmdd_connector.datadist.checks import (
    check,
    check_range,
    check_token,
    check_type,
    check_uint32,
    check_uint64,
)
from vllm_llmdd_connector.datadist.keys import BlocksCacheKey, CacheKeyByIdAndIndex

__all__ = ["LayerSynchronizer", "TransferConfig", "TransferWithCacheKeyConfig"]


class LayerSynchronizer(ABC):
    """Tells a layer-wise transfer when a layer has been computed."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer may be sent. False ends the whole transfer."""


class TransferConfig:
    """One destination by raw addresses: two per layer of ``src_layer_range``."""

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None  # without effect here

    @property
    def dst_cluster_id(self) -> int:
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        check_uint64("dst_cluster_id", dst_cluster_id)
        self._dst_cluster_id = dst_cluster_id

    @property
    def dst_addrs(self) -> Sequence[int]:
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Sequence[int]) -> None:
        check_type("dst_addrs", dst_addrs, list, tuple)
        for addr in dst_addrs:
            check_uint64("dst_addrs inner", addr)
        self._dst_addrs = dst_addrs

    @property
    def src_layer_range(self) -> range | None:
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range | None) -> None:
        check_range("src_layer_range", src_layer_range)
        self._src_layer_range = src_layer_range

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        check_uint32("src_batch_index", src_batch_index)
        self._src_batch_index = src_batch_index


class TransferWithCacheKeyConfig:
    """One destination by cache key. Both layer ranges are needed and have the same length.

    ``dst_cluster_id`` is the key's at construction; replacing ``cache_key`` does not change it.

    ``token`` is an extension of the vendor's API: it names a reservation of the destination
    (``CacheManager.open_reservation``), and the call's ``dst_block_indices`` are positions in it.
    Once the reservation is closed the config ends with ``LLM_KV_CACHE_NOT_EXIST``, without a copy
    and without ending the other configs.
    """

    def __init__(
        self,
        cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
        *,
        token: int | None = None,
    ) -> None:
        self.cache_key = cache_key
        self.token = token
        self.dst_cluster_id = cache_key.cluster_id
        self.src_layer_range = _required("src_layer_range", src_layer_range)
        self.dst_layer_range = _required("dst_layer_range", dst_layer_range)
        check(
            len(self.src_layer_range) == len(self.dst_layer_range),
            f"layer ranges differ in length: {len(self.src_layer_range)} and "
            f"{len(self.dst_layer_range)}",
        )
        self.src_batch_index = src_batch_index

    @property
    def cache_key(self) -> BlocksCacheKey | CacheKeyByIdAndIndex:
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: BlocksCacheKey | CacheKeyByIdAndIndex) -> None:
        check_type("cache_key", cache_key, BlocksCacheKey, CacheKeyByIdAndIndex)
        self._cache_key = cache_key

    @property
    def token(self) -> int | None:
        return self._token

    @token.setter
    def token(self, token: int | None) -> None:
        check_token(token)
        self._token = token

    @property
    def src_layer_range(self) -> range:
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: range) -> None:
        self._src_layer_range = _required("src_layer_range", src_layer_range)

    @property
    def dst_layer_range(self) -> range:
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: range) -> None:
        self._dst_layer_range = _required("dst_layer_range", dst_layer_range)

    @property
    def src_batch_index(self) -> int:
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        check_uint32("src_batch_index", src_batch_index)
        check(
            src_batch_index == 0 or not isinstance(self._cache_key, BlocksCacheKey),
            f"src_batch_index must be 0 with a BlocksCacheKey, got {src_batch_index}",
        )
        self._src_batch_index = src_batch_index


def _required(name: str, value: range | None) -> range:
    check_type(name, value, range)
    assert value is not None
    check_range(name, value)
    return value
