"""A program for the vendor's package: D pulls both rows of a cache of P's pool, each by its key."""

import ctypes

from llm_datadist import CacheDesc, CacheKey, DataType
from two_sides import P, begin, link_members, step

DESC = CacheDesc(num_tensors=4, shape=[2, 8], data_type=DataType.DT_UINT8)
KEYS = [CacheKey(prompt_cluster_id=P, req_id=request, model_id=0) for request in (0, 1)]


def prompt(datadist):
    comm_id = link_members(datadist)
    manager = datadist.cache_manager
    cache = manager.allocate_cache(DESC, KEYS)
    for letter, addr in zip("abcd", cache.tensor_addrs, strict=True):
        ctypes.memmove(addr, (letter * 8 + letter.upper() * 8).encode(), 16)
    step()  # the cache is there
    step()  # D has pulled
    for key in KEYS:
        manager.remove_cache_key(key)
    manager.deallocate_cache(cache)
    datadist.unlink(comm_id)


def decoder(datadist):
    comm_id = link_members(datadist)
    manager = datadist.cache_manager
    cache = manager.allocate_cache(DESC)
    step()
    for row, key in enumerate(KEYS):
        manager.pull_cache(key, cache, batch_index=1 - row)
    step()
    rows = [ctypes.string_at(addr, 16) for addr in cache.tensor_addrs]
    print(*[row.decode() for row in rows], flush=True)
    manager.deallocate_cache(cache)
    datadist.unlink(comm_id)


if __name__ == "__main__":
    pool = '{"memory_size": 1048576}'
    side, _, datadist = begin(enable_cache_manager=True, mem_pool_cfg=pool)
    (decoder if side else prompt)(datadist)
    datadist.finalize()
