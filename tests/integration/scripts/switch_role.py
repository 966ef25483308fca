"""A program for the vendor's package: D pulls from P, then both change roles and D pushes to P."""

from llm_datadist import BlocksCacheKey, LLMConfig, LLMRole
from two_sides import DESC, HOST, D, P, begin, full, link, show, step, unlink


def prompt(datadist, ports):
    manager = datadist.cache_manager
    tensors, addrs = full(10)
    cache = manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(P, 0))
    step()  # registered
    step()  # D has pulled and unlinked
    datadist.switch_role(LLMRole.DECODER)
    step()  # nobody listens any more
    step()  # D listens
    link(datadist, D, [ports[0], ports[0]])
    step()  # linked
    step()  # D has pushed
    show(tensors)
    unlink(datadist, D, force=True)
    manager.unregister_cache(cache.cache_id)


def decoder(datadist, ports):
    manager = datadist.cache_manager
    tensors, addrs = full(0)
    cache = manager.register_blocks_cache(DESC, addrs, BlocksCacheKey(D, 0))
    step()
    link(datadist, P, ports)
    manager.pull_blocks(BlocksCacheKey(P, 0), cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    show(tensors)
    unlink(datadist, P, ports)
    step()
    step()
    config = LLMConfig()
    config.listen_ip_info = f"{HOST}:{ports[0]}"
    datadist.switch_role(LLMRole.PROMPT, config.generate_options())
    step()
    step()
    layers = {"src_layer_range": range(2), "dst_layer_range": range(2)}
    blocks = list(range(3))
    manager.push_blocks(
        BlocksCacheKey(P, 0), cache, blocks, blocks, **layers, tensor_num_per_layer=1
    )
    step()
    unlink(datadist, P, force=True)
    manager.unregister_cache(cache.cache_id)


if __name__ == "__main__":
    side, ports, datadist = begin(local_comm_res="")
    (decoder if side else prompt)(datadist, ports)
    datadist.finalize()
