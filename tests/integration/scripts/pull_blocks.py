"""A program for the vendor's package: D pulls two blocks of P. Nothing here knows of this project.

P: pull_blocks.py --cluster-id 1 --port 26000      D: the same with --cluster-id 2, P's port
"""

import argparse

import torch
import torch_npu  # noqa: F401
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)

P_CLUSTER_ID, D_CLUSTER_ID = 1, 2
NUM_TENSORS, NUM_BLOCKS, BLOCK = 4, 8, 256


def init(role, cluster_id, device_id, listen):
    datadist = LLMDataDist(role, cluster_id)
    config = LLMConfig()
    config.device_id = device_id
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    if listen:
        config.listen_ip_info = listen
    datadist.init(config.generate_options())
    return datadist


def register(datadist, cluster_id, value):
    tensors = [
        torch.full((NUM_BLOCKS, BLOCK), float(value + i), dtype=torch.float16).npu()
        for i in range(NUM_TENSORS)
    ]
    desc = CacheDesc(NUM_TENSORS, [NUM_BLOCKS, BLOCK], DataType.DT_FLOAT16)
    cache = datadist.cache_manager.register_blocks_cache(
        desc, [tensor.data_ptr() for tensor in tensors], BlocksCacheKey(cluster_id, 0)
    )
    return tensors, cache


def run_prompt(args):
    datadist = init(LLMRole.PROMPT, P_CLUSTER_ID, args.device_id, f"127.0.0.1:{args.port}")
    tensors, cache = register(datadist, P_CLUSTER_ID, 10)
    print("registered", flush=True)
    input()
    assert all((tensor == 10 + i).all() for i, tensor in enumerate(tensors))
    datadist.cache_manager.unregister_cache(cache.cache_id)
    datadist.finalize()


def run_decoder(args):
    datadist = init(LLMRole.DECODER, D_CLUSTER_ID, args.device_id, None)
    tensors, cache = register(datadist, D_CLUSTER_ID, 0)
    before = [tensor.cpu() for tensor in tensors]
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = P_CLUSTER_ID
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", args.port)
    status, _ = datadist.link_clusters([cluster], 10000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    key = BlocksCacheKey(P_CLUSTER_ID, 0)
    datadist.cache_manager.pull_blocks(key, cache, src_blocks=[0, 1], dst_blocks=[0, 2])
    for i, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
        assert (old == i).all()
        assert (tensor[[0, 2]].cpu() == 10 + i).all()
        assert (tensor[[1, 3, 4, 5, 6, 7]].cpu() == i).all()
    status, _ = datadist.unlink_clusters([cluster], 10000, force=True)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    datadist.finalize()
    print("pulled", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device-id", type=int, default=0)
    parser.add_argument("--cluster-id", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.npu.set_device(options.device_id)
    if options.cluster_id == P_CLUSTER_ID:
        run_prompt(options)
    else:
        run_decoder(options)
