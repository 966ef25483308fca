"""A program for the vendor's package, backend hixl: P pulls from D while D pushes to P."""

from llm_datadist import BlocksCacheKey
from two_sides import DESC, D, P, begin, full, link, show, step, unlink


def main(side, ports, datadist):
    other = P if side == D else D
    manager = datadist.cache_manager
    tensors, addrs = full(0 if side == D else 1)
    cache = manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(side, 0))
    step()  # registered
    link(datadist, other, ports)
    if side == P:
        manager.pull_blocks(BlocksCacheKey(D, 0), cache, src_blocks=[2], dst_blocks=[2])
    else:
        manager.push_blocks(BlocksCacheKey(P, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 1])
    step()  # pulled and pushed
    show(tensors)
    unlink(datadist, other)
    step()  # both have unlinked
    manager.unregister_cache(cache.cache_id)


if __name__ == "__main__":
    side, ports, datadist = begin(local_comm_res="", transfer_backend="hixl")
    main(side, ports, datadist)
    datadist.finalize()
