"""A program for the vendor's package: D pushes a row into P's first cache, which it names by id."""

from llm_datadist import CacheKeyByIdAndIndex
from two_sides import DESC, P, begin, full, link, show, step, unlink


def prompt(datadist, _):
    tensors, addrs = full(0)
    cache = datadist.cache_manager.register_cache(DESC, addrs)
    step()  # registered
    step()  # pushed
    show(tensors)
    step()  # unlinked
    datadist.cache_manager.unregister_cache(cache.cache_id)


def decoder(datadist, ports):
    manager = datadist.cache_manager
    _tensors, addrs = full(40)
    cache = manager.register_cache(DESC, addrs)
    step()
    link(datadist, P, ports)
    key = CacheKeyByIdAndIndex(cluster_id=P, cache_id=1, batch_index=1)
    manager.push_cache(key, cache, src_batch_index=0)
    step()
    unlink(datadist, P, ports)
    step()
    manager.unregister_cache(cache.cache_id)


if __name__ == "__main__":
    side, ports, datadist = begin(local_comm_res="")
    (decoder if side else prompt)(datadist, ports)
    datadist.finalize()
