"""A program for the vendor's package: P links to D and sends a layer without any block lists."""

from llm_datadist import (
    BlocksCacheKey,
    LayerSynchronizer,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from two_sides import DESC, D, P, begin, full, link, show, step, unlink


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        return True


def prompt(datadist, ports):
    manager = datadist.cache_manager
    _tensors, addrs = full(30)
    cache = manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(P, 0))
    step()  # registered
    link(datadist, D, ports)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(D, 0), range(1), range(1))
    task = manager.transfer_cache_async(cache, Ready(), [config])
    print(task.get_results() == [LLMStatusCode.LLM_SUCCESS], flush=True)
    step()  # sent
    unlink(datadist, D, force=True)
    manager.unregister_cache(cache.cache_id)


def decoder(datadist, _):
    tensors, addrs = full(0)
    cache = datadist.cache_manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(D, 0))
    step()
    step()
    show(tensors)
    unlink(datadist, P, force=True)
    datadist.cache_manager.unregister_cache(cache.cache_id)


if __name__ == "__main__":
    side, ports, datadist = begin(enable_cache_manager=True, enable_remote_cache_accessible=True)
    (decoder if side else prompt)(datadist, ports)
    datadist.finalize()
