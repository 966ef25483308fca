"""A program for the vendor's package: D pulls P's blocks, moves them to host memory and back."""

import torch
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, Placement
from two_sides import BLOCKS, DESC, NUMBERS, P, begin, full, link_members, show, step


def prompt(datadist):
    _tensors, addrs = full(10)
    datadist.cache_manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(P, 0))
    comm_id = link_members(datadist)
    step()  # D has pulled
    datadist.unlink(comm_id)


def host_cache():
    shape = [BLOCKS, NUMBERS]
    tensors = [torch.zeros(shape, dtype=torch.float) for _ in range(2)]
    desc = CacheDesc(2, shape, DataType.DT_FLOAT, Placement.HOST)
    return tensors, Cache.create_cpu_cache(desc, [tensor.data_ptr() for tensor in tensors])


def decoder(datadist):
    manager = datadist.cache_manager
    tensors, addrs = full(0)
    cache = manager.register_blocks_cache(DESC, addrs)
    comm_id = link_members(datadist)
    manager.pull_blocks(BlocksCacheKey(P, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 1])
    step()
    host, cpu_cache = host_cache()
    manager.swap_blocks(cache, cpu_cache, {0: 0, 1: 2})
    show(host)
    host[1][2].fill_(77)
    manager.swap_blocks(cpu_cache, cache, {0: 2, 2: 1})
    show(tensors)
    datadist.unlink(comm_id)


if __name__ == "__main__":
    side, _, datadist = begin(enable_cache_manager=True)
    (decoder if side else prompt)(datadist)
    datadist.finalize()
