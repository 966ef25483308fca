"""A program for the vendor's package: D pulls a row of P's pool into a block of its own."""

import ctypes

from llm_datadist import CacheKey
from two_sides import DESC, NUMBERS, P, begin, full, link_members, show, step

KEY = CacheKey(prompt_cluster_id=P, req_id=0, model_id=0)


def prompt(datadist):
    comm_id = link_members(datadist)
    manager = datadist.cache_manager
    cache = manager.allocate_cache(DESC, [KEY])
    for value, addr in enumerate(cache.tensor_addrs, 60):
        row = (ctypes.c_float * NUMBERS).from_address(addr)
        row[:] = [value] * NUMBERS
    step()  # the cache is there
    step()  # pulled
    datadist.unlink(comm_id)
    step()  # both have unlinked
    manager.remove_cache_key(KEY)
    manager.deallocate_cache(cache)


def decoder(datadist):
    tensors, addrs = full(1)
    cache = datadist.cache_manager.register_blocks_cache(DESC, addrs)
    comm_id = link_members(datadist)
    step()
    datadist.cache_manager.pull_blocks(KEY, cache, src_blocks=[], dst_blocks=[2])
    step()
    show(tensors)
    datadist.unlink(comm_id)
    step()


if __name__ == "__main__":
    pool = '{"memory_size": 1048576}'
    side, _, datadist = begin(enable_cache_manager=True, mem_pool_cfg=pool)
    (decoder if side else prompt)(datadist)
    datadist.finalize()
